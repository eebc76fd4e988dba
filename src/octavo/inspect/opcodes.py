"""Owns what each SASS opcode is, in plain words, and the group it is counted under: opcodes.txt, read."""

from __future__ import annotations

from pathlib import Path

from octavo.inspect.sass import Step

MATH, TENSOR, MOVE, OTHER = "math", "tensor core", "move", "other"
GROUP_ORDER = (
    *(TENSOR, MATH, "load", "store", "TMA"),
    *("sync", "address", MOVE, "control", OTHER),
)
_TABLE = [
    [cell.strip() for cell in line.split("|")]
    for line in (Path(__file__).parent / "opcodes.txt").read_text().splitlines()
    if not line.startswith("#")
]
_KNOWN = {root: (group, words) for group, roots, words in _TABLE for root in roots.split()}


def _lookup(root: str) -> tuple[str, str]:
    if root not in _KNOWN and root[1:] in _KNOWN and root.startswith("U"):
        group, words = _KNOWN[root[1:]]
        return group, f"{words}; on the uniform datapath (once a warp)"
    return _KNOWN.get(root, (OTHER, ""))


def group_of(step: Step) -> str:
    """The group an instruction is counted under; unknown opcodes are "other"."""
    is_move = step.opcode.startswith(("IMAD.MOV", "HFMA2.MMA"))
    return MOVE if is_move else _lookup(step.root)[0]


def words_of(root: str) -> str:
    """What the opcode does, or an empty text for one we do not know."""
    return _lookup(root)[1]
