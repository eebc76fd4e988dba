"""Owns PTX as data: parses NVRTC's text into instructions with the source lines they are from.

PTX is what the compiler's front end wrote: unrolling and inlining are visible here, registers are
still unlimited, and instructions are not yet scheduled. ptxas then makes SASS of it.
"""

from __future__ import annotations

import re

from octavo.inspect.sass import Location, Step

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+(\w+)")
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_INSTRUCTION = re.compile(r"(?:^|[;{}:])\s*(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*([^;]*?)\s*(?=;)")


def parse_ptx(text: str) -> dict[str, list[Step]]:
    """The instructions of each kernel by name. Declarations and debug sections are skipped."""
    files = dict(_FILE.findall(text))
    found: dict[str, list[Step]] = {}
    steps: list[Step] = []
    depth = 0  # of braces: a kernel's body, and blocks of inline assembly in it
    callers: dict[Location, Location | None] = {}
    chain: tuple[Location, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("//", 1)[0]
        if entry := _ENTRY.search(code):
            steps, callers, chain = found.setdefault(entry.group(1), []), {}, ()
        elif loc := _LOC.match(code):
            # It names the innermost line; who called that may have been said further back.
            file, row, from_file, from_line = loc.groups(default="")
            here = Location(files.get(file, ""), int(row))
            caller = Location(files.get(from_file, ""), int(from_line)) if from_file else None
            callers[here] = caller
            chain = (here,)
            while caller and caller not in chain:
                chain += (caller,)
                caller = callers.get(caller)
        elif depth:
            for guard, opcode, operands in _INSTRUCTION.findall(code):
                steps.append(Step(number, guard, opcode, operands, chain))
        depth += code.count("{") - code.count("}")
    return found
