"""Command-line options shared by the verbs, made from the dataclasses they fill."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import errno
import inspect
import itertools
import os
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from octavo.config.engine import EngineArgs
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "ignore_eos",
    "include_stop_str_in_output", "logprobs", "prompt_logprobs",
)  # fmt: skip


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, a Hugging Face id, or 'demo'"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for every engine setting but the model."""
    group = parser.add_argument_group("engine settings")
    for name in (field.name for field in dataclasses.fields(EngineArgs)):
        if name != "model":
            _add(group, EngineArgs, name)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for LLM out of parsed options: those the user gave, and the model."""
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    return {name: value for name, value in vars(args).items() if name in names}


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    fields: Sequence[str] = SAMPLING_FIELDS,
    **defaults: Any,
) -> None:
    """Options for the sampling parameters `fields`; `defaults` replace theirs."""
    group = parser.add_argument_group("sampling parameters")
    for name in fields:
        if name != "seed":  # the engine's --seed already fixes every request that has none
            _add(group, SamplingParams, name, **defaults)
    parser.set_defaults(sampling_defaults=defaults)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams out of parsed options. Raises InvalidRequestError naming the field."""
    given = {
        name: value
        for name, value in vars(args).items()
        if name in SAMPLING_FIELDS and name != "seed"
    }
    return SamplingParams(**{**args.sampling_defaults, **given})


def _add(group: argparse._ArgumentGroup, owner: type, name: str, **defaults: Any) -> None:
    """One option; it is absent from the namespace unless given, so defaults stay in one place."""
    hint = get_type_hints(owner)[name]
    default = next(f.default for f in dataclasses.fields(owner) if f.name == name)
    default = defaults.get(name, default)
    shown = "" if default is None else f" [{default}]"
    options: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": (_field_docs(owner).get(name, "") + shown).replace("%", "%%").strip(),
    }
    kinds = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(kinds[0]) is Literal:
        options["choices"] = get_args(kinds[0])
    elif name == "stop":
        options |= {"action": "append", "metavar": "TEXT"}
    else:
        kind = next(kind for kind in kinds if kind in (int, float, str))
        options |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
    group.add_argument(f"--{name.replace('_', '-')}", **options)


def _field_docs(owner: type) -> dict[str, str]:
    """Docstrings that stand under the fields of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[field.target.id] = str(after.value.value)
    return docs


def at_least(low: int, args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError naming the first of these options, if given, that is less than `low`."""
    for name in names:
        if (value := getattr(args, name, low)) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, not {value}")


def check_writable(option: str, path: Path) -> None:
    """Raises ConfigError naming the option if no file can be written there. Leaves no trace."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists():
            # Not opened: the other end of a pipe would take that for the whole message.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            target = path.resolve()
            target.touch(exist_ok=False)
            target.unlink()
    except OSError as error:
        raise _cannot_write(option, path, error) from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file. Raises ConfigError naming the option if that fails."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _cannot_write(option, path, error) from None


def _cannot_write(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option}: cannot write {path}: {error.strerror or error}")
