"""Text that a user names a file for, read up to a limit: a device or a pipe may have no end."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from octavo.errors import ConfigError

_MAX_CHARS = 2**26


def read_text(option: str, path: Path) -> str:
    """The UTF-8 text of a file or a pipe. Raises ConfigError naming the option and the path."""
    try:
        with path.open(encoding="utf-8") as file:
            return read_all(f"{option}: {path}", file)
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from None


def read_all(name: str, stream: TextIO) -> str:
    """What an open stream still holds; `name` begins the text of a ConfigError."""
    try:
        text = stream.read(_MAX_CHARS + 1)
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not text") from None
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"{name} has more than {_MAX_CHARS} characters")
    return text
