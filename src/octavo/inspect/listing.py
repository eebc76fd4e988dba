"""Owns one instruction of PTX or SASS, as both parsers make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Location(NamedTuple):
    """A line of a source file, as the compiler names it."""

    file: str
    line: int


@dataclass(frozen=True)
class Step:
    """One instruction. `at` is a SASS offset in bytes, or a line of the PTX text, counted from 1.

    `guard` is "" or "!P0". `locations` are the line that wrote it and those it was inlined into,
    innermost first; empty without -lineinfo. SASS only: `ptx_line` is the line of the PTX text that
    it was made of, `target` the index that it branches to.
    """

    at: int
    guard: str
    opcode: str
    operands: str
    locations: tuple[Location, ...] = ()
    ptx_line: int | None = None
    target: int | None = None

    @property
    def root(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def names(self) -> list[str]:
        """The operands one by one."""
        return [name.strip().removesuffix(".reuse") for name in self.operands.split(",")]

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    def starts(self, prefix: str) -> bool:
        """Whether the opcode is `prefix` or goes on after a dot: "LDG" fits LDG.E, not LDGSTS."""
        return f"{self.opcode}.".startswith(f"{prefix}.")
