"""The sampling kernels: they compile for Hopper without spills that matter, and penalties are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cpu.kernels.triton.compile_harness import Case, compile_cases

from octavo.kernels.triton import sampling, sampling_cut, sampling_penalties
from octavo.kernels.triton.sampling_penalties import penalize
from octavo.sample import edits
from octavo.sample.random import request_key
from octavo.sample.state import Column

VOCAB = 151936
_TYPES = {
    "logits": "*bf16",
    "stride": "i32:16",
    "work": "*fp32",
    "work_rows": "*i32",
    "rows": "*i64",
    "table": "*fp64",
    "scratch": "*i64",
    "block_bounds": "*fp32",
    "lists": "*fp32",
    "host": "*i32",
    "history": "*i32",
    "history_len": "i32:16",
    "num_tokens": "*i32",
    "num_prompt_tokens": "*i32",
    "norms": "*fp32",
    "counts": "*i32",
    "slots": "*i64",
}


def case(label: str, kernel: Any, options: dict[str, Any]) -> Case:
    options = {name: value for name, value in options.items() if name != "enable_fp_fusion"}
    types = {
        name: _TYPES[name] for name in kernel.arg_names if name in _TYPES and name not in options
    }
    return Case.of_launch(kernel, types, options, label)


def test_kernels_compile_for_hopper() -> None:
    options = sampling.launch_options(4096, VOCAB)
    cut_options = sampling_cut.cut_options(4096, VOCAB)
    count = {"VOCAB": VOCAB, "HISTORY_LEN": 4096, "TILE": 1024, "SPLIT": 8}
    kernels = compile_cases(
        [
            case("scan", sampling.scan, options),
            case("draw", sampling.draw, options),
            case("score", sampling.score, options),
            case("cut", sampling_cut.cut, cut_options),
            case("count", sampling_penalties._count, count),
            case("penalize", sampling_penalties._penalize, {"VOCAB": VOCAB, "CHUNK": 1024}),
        ]
    )
    for label, kernel in kernels.items():
        # `cut` holds a few scalars in local memory: 16 warps leave 128 registers to a thread.
        assert kernel.spill_bytes <= (64 if label == "cut" else 0), label
    assert kernels["draw"].registers <= 128


@pytest.mark.parametrize("vocab", [50, 1500])
def test_penalties_equal_the_processors(vocab: int) -> None:
    """Bit for bit; stale tokens behind a history and rows that are not penalised stay as they are."""
    generator = torch.Generator().manual_seed(vocab)
    history = torch.randint(0, vocab, (5, 40), dtype=torch.int32, generator=generator)
    num_tokens = torch.tensor([40, 3, 17, 1, 9], dtype=torch.int32)
    num_prompt_tokens = torch.tensor([30, 3, 1, 1, 0], dtype=torch.int32)
    table = torch.zeros(5, len(Column), dtype=torch.float64)
    table[:, Column.KEY_FIRST], table[:, Column.KEY_SECOND] = request_key(1)
    table[:, Column.REPETITION] = torch.tensor([1.3, 0.7, 1.0, 5.0, 1.1])
    table[:, Column.PRESENCE] = torch.tensor([0.1, -0.3, 2.0, 0.0, 0.7])
    table[:, Column.FREQUENCY] = torch.tensor([0.33, 0.0, -1.7, 0.5, 0.9])
    work = torch.randn(4, vocab, generator=generator) * 5
    work[:, 7] = -torch.inf
    work_rows, slots = torch.tensor([3, 0, 2]), torch.tensor([0, 2, 4])

    expected = work.clone()
    edits.penalize(expected, work_rows, slots, table, history, num_tokens, num_prompt_tokens)
    history[4, 20] = vocab + 5  # stale: behind the history
    penalize(work, work_rows, slots, table, history, num_tokens, num_prompt_tokens)
    assert torch.equal(work, expected)
