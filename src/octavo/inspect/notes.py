"""Owns the list of remarks on one kernel: what the compiler did, in words, most useful first."""

from __future__ import annotations

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.notes_loops import loop_notes
from octavo.inspect.notes_machine import (
    math_notes,
    memory_notes,
    oddity_notes,
    register_notes,
    sync_notes,
    tma_notes,
    warning_notes,
)


def notes(assembly: Assembly) -> list[Note]:
    """All remarks, grouped by topic in a fixed order."""
    return [
        *warning_notes(assembly),
        *register_notes(assembly),
        *loop_notes(assembly),
        *math_notes(assembly),
        *memory_notes(assembly),
        *tma_notes(assembly),
        *sync_notes(assembly),
        *oddity_notes(assembly),
    ]
