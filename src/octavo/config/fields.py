"""Typed access to what a model's config says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ConfigError, OctavoError, shown

# Far above any real model, so that a damaged config is refused and not tried.
MAX_SIZE = 2**31 - 1
_FLOAT32 = (1.2e-38, 3.4e38)


class FieldReader:
    """Typed access to config keys; every complaint names the key and the file."""

    def __init__(
        self, config: Mapping[str, Any], where: str, kind: type[OctavoError] = ConfigError
    ) -> None:
        """`kind` is what is raised."""
        self.config, self.where, self.kind = config, where, kind

    def error(self, key: str, text: str) -> OctavoError:
        return self.kind(f"{self.where}: {key}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        """What the config says for the key, or `default` if that is nothing."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "missing")
        return value

    def count(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """An integer from 1 to `limit`. Per-layer lists are refused: all layers must be alike."""
        value = self.get(key, default)
        if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
            raise self.error(key, f"differs per layer ({shown(value)}), which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error(key, f"{shown(value)} is not a positive integer")
        if value > limit:
            raise self.error(key, f"{shown(value)} is more than {limit}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A positive number that a float32 holds, and not below `least`."""
        value = self.checked(key, self.get(key, default))
        if value < least:
            raise self.error(key, f"{value} is below {least:g}")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` such numbers."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, f"{shown(values)} is not a list of {count} numbers")
        return tuple(self.checked(key, value) for value in values)

    def checked(self, key: str, value: Any) -> float:
        """`value`, said or worked out for `key`, as the number that it must be."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"{shown(value)} is not a number")
        if not _FLOAT32[0] <= value <= _FLOAT32[1]:
            raise self.error(key, f"{shown(value)} is not positive and finite in float32")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{shown(value)} is not true or false")
        return value


def token_ids(value: Any, where: str, vocab_size: int) -> tuple[int, ...]:
    """One token id, a list of them, or None for none; `where` names file and key in errors.

    Negative ids are refused. Ids from vocab_size on are left out: some real configs name tokens
    that their embedding does not have, and those can never be sampled.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in values):
        raise ConfigError(f"{where}: {shown(value)} is not a token id or a list of them")
    return tuple(dict.fromkeys(one for one in values if one < vocab_size))
