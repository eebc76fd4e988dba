"""2,000 damaged configs, indices, shards and GGUF headers, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.weights.helpers import save_folder, save_small_gguf

SAMPLE, ALL = 300, 2000
ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, first: int, last: int) -> None:
    (folder / "hf").mkdir()
    save_folder(folder / "hf", shards=2, vocab_size=64, num_hidden_layers=1)
    save_small_gguf(folder / "bpe.gguf", "gpt2")
    save_small_gguf(folder / "spm.gguf", "llama")
    command = [sys.executable, "-m", "tests.cpu.weights.fuzz", str(folder), str(first), str(last)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"case {lines[-1:]}: {done.returncode} {done.stderr[-3000:]}"
    counts = json.loads(lines[-1])
    assert sum(counts.values()) == last - first
    assert min(counts.values()) > (last - first) // 20  # neither harmless nor total


def test_a_sample_of_damaged_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, 0, SAMPLE)


@pytest.mark.soak
def test_all_damaged_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, SAMPLE, ALL)
