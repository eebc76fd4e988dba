"""The demo model on a machine that cannot install its package: joined from two carried parts.

The file is too large for one transfer. `split -n 2 -d -a 1 FILE .carry/smollm2.gguf.` in the root of
the repository makes the parts (`.carry/` is not tracked), and each travels with a call of its own.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.weights.hub import DEMO_SHA256, find_demo_model

ROOT = Path(__file__).resolve().parents[2]
PARTS = tuple(ROOT / ".carry" / f"smollm2.gguf.{number}" for number in (0, 1))


def demo_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, checked; skips the test where there is none."""
    try:
        path = find_demo_model()
    except ModelLoadError as error:
        missing = [part.name for part in PARTS if not part.is_file()]
        if missing:
            pytest.skip(f"{error}; nor are its parts in {PARTS[0].parent}: no {', '.join(missing)}")
        path = _joined()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == DEMO_SHA256, f"{path} is not the file that the tests were written for"
    return path


@cache
def _joined() -> Path:
    """The parts in one file, for this process only."""
    with tempfile.NamedTemporaryFile(prefix="smollm2-", suffix=".gguf", delete=False) as target:
        for part in PARTS:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    return Path(target.name)
