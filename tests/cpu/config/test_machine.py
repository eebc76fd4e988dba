"""Memory that a container has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import machine

LIMIT, USAGE, CACHED = 900_000, 700_000, 250_000


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "1"}, None),
        ({"memory.max": str(LIMIT), "memory.current": str(USAGE)}, LIMIT - USAGE),
        (
            {
                "memory.max": str(LIMIT),
                "memory.current": str(USAGE),
                "memory.stat": f"anon 5\ninactive_file {CACHED}\n",
            },
            LIMIT - USAGE + CACHED,
        ),
        (
            {
                "memory/memory.limit_in_bytes": str(LIMIT),
                "memory/memory.usage_in_bytes": str(USAGE),
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {CACHED}\n",
            },
            LIMIT - USAGE + CACHED,
        ),
    ],
)
def test_what_a_container_has_left(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of files, the weights just read among them, are given back when memory is asked for."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    if expected is None:
        assert machine.available_memory() > LIMIT
    else:
        assert machine.available_memory() == expected
