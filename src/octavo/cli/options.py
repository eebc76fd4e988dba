"""Command-line options shared by the verbs, made from the dataclasses they fill."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import errno
import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from octavo.config.engine import MAX_COUNT, EngineArgs
from octavo.errors import ConfigError, shown
from octavo.sampling_params import MODEL_DEFAULTS, SamplingParams

# Without "seed": the engine's --seed already fixes every request that has none.
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "max_tokens", "min_tokens", "stop", "ignore_eos",
    "include_stop_str_in_output", "logprobs", "prompt_logprobs",
)  # fmt: skip


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    text = "a folder, a .gguf file, a Hugging Face id, or 'demo'"
    parser.add_argument("model", metavar="MODEL", help=text)


def integer(text: str, least: int = 1) -> int:
    """The type of options that are a count."""
    with suppress(ValueError):
        if least <= (value := int(text)) <= MAX_COUNT:
            return value
    raise argparse.ArgumentTypeError(f"must be from {least} to {MAX_COUNT}, not {shown(text)}")


def add_number(
    parser: argparse._ActionsContainer, name: str, default: int, text: str, least: int = 1
) -> None:
    """An option that is an integer; its help shows the default."""
    kind, option = partial(integer, least=least), f"--{name.replace('_', '-')}"
    parser.add_argument(option, type=kind, default=default, metavar="N", help=f"{text} [{default}]")


def add_step_arguments(parser: argparse._ActionsContainer) -> None:
    """What kind of step `bench step` measures and `explain --step` explains."""
    add_number(parser, "batch_size", 1, "requests of the step")
    add_number(parser, "context", 1024, "tokens of a request: cached ones, or those of its prompt")
    parser.add_argument(
        "--prefill", dest="phase", action="store_const", const="prefill", default="decode",
        help="run whole prompts; else decode",
    )  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for every engine setting but the model."""
    names = [field.name for field in dataclasses.fields(EngineArgs) if field.name != "model"]
    _add_fields(parser.add_argument_group("engine settings"), EngineArgs, names, {})


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for LLM out of parsed options: those the user gave, and the model."""
    known = EngineArgs.__dataclass_fields__
    return {name: value for name, value in vars(args).items() if name in known}


def add_sampling_arguments(
    parser: argparse.ArgumentParser, fields: Sequence[str] = SAMPLING_FIELDS, **defaults: Any
) -> None:
    """Options for the sampling parameters `fields`; `defaults` replace theirs."""
    group = parser.add_argument_group("sampling parameters")
    _add_fields(group, SamplingParams, fields, defaults)
    parser.set_defaults(sampling_defaults=defaults)


def sampling_params(args: argparse.Namespace, of_model: Iterable[Any] = ()) -> SamplingParams:
    """The options given, else the model's defaults, else the verb's. Raises InvalidRequestError."""
    given = {name: value for name, value in vars(args).items() if name in SAMPLING_FIELDS}
    return SamplingParams(**{**args.sampling_defaults, **dict(of_model), **given})


def _add_fields(
    group: argparse._ArgumentGroup, owner: type, names: Sequence[str], defaults: dict[str, Any]
) -> None:
    """One option a field; absent from the namespace unless given, so defaults stay in one place."""
    hints, docs = get_type_hints(owner), _field_docs(owner)
    defaults = {field.name: field.default for field in dataclasses.fields(owner)} | defaults
    for name in names:
        shown = "" if defaults[name] is None else f" [{defaults[name]}]"
        if owner is SamplingParams and name in MODEL_DEFAULTS:
            shown = f" [the model's, else {defaults[name]}]"
        options: dict[str, Any] = {"help": (docs.get(name, "") + shown).replace("%", "%%").strip()}
        kinds = get_args(hints[name]) or (hints[name],)
        if bool in kinds:
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(kinds[0], str):  # of a Literal
            options["choices"] = kinds
        elif name == "stop":
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            kind = next(kind for kind in kinds if kind in (int, float, str))
            options |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
        group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **options)


def _field_docs(owner: type) -> dict[str, str]:
    """Docstrings that stand under the fields of a dataclass."""
    [tree] = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for pair in itertools.pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                docs[name] = text
    return docs


def check_writable(option: str, path: Path) -> None:
    """Raises ConfigError naming the option if no file can be written there. Leaves no trace."""
    with _naming(option, path):
        if not path.exists():
            target = path.resolve()
            target.touch(exist_ok=False)
            target.unlink()
        elif path.is_dir() or not os.access(path, os.W_OK):
            # Not opened: the other end of a pipe would take that for the whole message.
            number = errno.EISDIR if path.is_dir() else errno.EACCES
            raise OSError(number, os.strerror(number))


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file. Raises ConfigError naming the option if that fails."""
    with _naming(option, path):
        path.write_text(text, "utf-8")


@contextmanager
def _naming(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror or error}") from None
