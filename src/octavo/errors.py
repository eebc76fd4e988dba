"""Every exception that Octavo raises on purpose, in one tree.

`assert` elsewhere means a bug of ours; what a user or the environment can cause is one of these.
"""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

_T = TypeVar("_T")


class OctavoError(Exception):
    """Base of all deliberate errors."""


class InvalidRequestError(OctavoError, ValueError):
    """One request asks for something that cannot be done; the HTTP layer answers 400.

    `field` is the name of the offending parameter as the caller spells it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ConfigError(OctavoError, ValueError):
    """A setting, or a combination of settings, that cannot work. The text names the setting."""


class ModelLoadError(OctavoError):
    """A checkpoint that is missing, incomplete, malformed or of an unsupported kind."""


class EngineDeadError(OctavoError):
    """The engine stopped for good; every request in it has failed."""


class DeviceLostError(EngineDeadError):
    """The GPU runs nothing more in this process, as after an illegal memory access."""


class KernelError(OctavoError):
    """A kernel cannot be compiled, loaded or launched: no GPU, driver or compiler, or a bad shape."""


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 256 else f"<integer of {x.bit_length()} bits>"


shown = _Repr().repr
"""A repr for error texts: short, and without exceptions for values of any depth or size."""


def expect(field: str, value: Any, kind: type[_T] | tuple[type[_T], ...], wanted: str) -> _T:
    """`value`, which is of that kind (a bool is no number), or InvalidRequestError says what is wanted."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequestError(field, f"must be {wanted}, not {shown(value)}")
    return value
