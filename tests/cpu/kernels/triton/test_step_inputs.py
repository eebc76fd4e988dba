"""Step inputs made by kernels equal those that torch makes, padding included, at any mix of lengths."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.cpu.kernels.triton.compile_harness import Case, compile_cases

from octavo.config.resolve import GPU_BLOCK_SIZES
from octavo.core.request import EngineRequest
from octavo.core.scheduler_output import NewRequestData, SchedulerOutput
from octavo.kernels.triton.step_inputs import BLOCK, _prepare, _write_segments, write_segments
from octavo.sampling_params import SamplingParams
from octavo.worker.forward_batch import build_common_metadata
from octavo.worker.pinned import PinnedRing
from octavo.worker.request_slots import RequestSlots
from octavo.worker.step_inputs import StepInputs

CPU = torch.device("cpu")
WIDE = {"positions", "slot_mapping", "logits_indices"}
NUMBERS = {
    "num_requests", "num_tokens", "num_sampled", "padded_requests", "padded_tokens", "max_model_len",
    "max_blocks", "max_num_seqs", "max_tokens",
}  # fmt: skip


def admitted(
    lengths: list[tuple[int, int]], block_size: int, max_num_seqs: int, num_groups: int
) -> RequestSlots:
    """Slots with one request per (known tokens, computed tokens)."""
    slots = RequestSlots(max_num_seqs, 2048, block_size, CPU, num_groups)
    rng = random.Random(len(lengths))
    new = []
    for index, (known, computed) in enumerate(lengths):
        tokens = [rng.randrange(1, 1000) for _ in range(known)]
        blocks = [rng.randrange(1, 5000) for _ in range(num_groups * -(-known // block_size))]
        request = EngineRequest(str(index), tokens, SamplingParams(), seed=1)
        new.append(NewRequestData(request, tokens, blocks, computed, 1))
    slots.update(SchedulerOutput(1, new_requests=new))
    return slots


@pytest.mark.parametrize(
    ("lengths", "query_lens", "padded"),
    [
        ([(5, 4)], [1], (1, 1)),
        ([(5, 4)], [1], (4, 4)),
        ([(1500, 100), (40, 39), (7, 0), (16, 16)], [1400, 1, 5, 0], (4, 1406)),
        ([(33, 32), (700, 669), (17, 16)], [1, 31, 1], (6, 40)),
    ],
)
@pytest.mark.parametrize(("block_size", "num_groups"), [(16, 1), (32, 1), (16, 3)])
def test_inputs_equal_those_of_torch(
    lengths: list[tuple[int, int]],
    query_lens: list[int],
    padded: tuple[int, int],
    block_size: int,
    num_groups: int,
) -> None:
    slots = admitted(lengths, block_size, 6, num_groups)
    names = [str(index) for index in range(len(lengths))]
    random.Random(1).shuffle(names)
    rows = [slots.slot_of[name] for name in names]
    query_lens = [query_lens[int(name)] for name in names]
    seq_lens = [lengths[int(name)][1] + n for name, n in zip(names, query_lens, strict=True)]
    common, input_ids = build_common_metadata(
        slots, torch.tensor(rows), query_lens, max(seq_lens), block_size
    )
    sampled = [row for row in range(len(rows)) if row % 2 == 0]
    inputs = StepInputs(slots, 2048, block_size, CPU)
    for tensor in vars(inputs).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(77)  # what an earlier step left
    inputs.fill(np.array(rows), np.array(query_lens), np.array(sampled), padded)

    num_requests, num_tokens = len(rows), sum(query_lens)
    made = inputs.common(*padded)
    assert inputs.input_ids[:num_tokens].tolist() == input_ids.tolist()
    assert made.positions[:num_tokens].tolist() == common.positions.tolist()
    assert made.slot_mapping[..., :num_tokens].tolist() == common.slot_mapping.tolist()
    assert made.slot_mapping.dim() == made.block_tables.dim() - 1 == 1 + (num_groups > 1)
    assert made.seq_lens.tolist() == [*seq_lens, *[0] * (padded[0] - num_requests)]
    starts = common.query_start_loc.tolist()
    assert made.query_start_loc.tolist() == starts + [num_tokens] * (padded[0] - num_requests)
    for row, length in enumerate(seq_lens):
        used = -(-length // block_size)
        expected = common.block_tables[..., row, :used].tolist()
        assert made.block_tables[..., row, :used].tolist() == expected
    assert inputs.logits_indices[: len(sampled)].tolist() == [starts[r + 1] - 1 for r in sampled]
    assert (inputs.logits_indices[len(sampled) : padded[0]] == 0).all()
    assert inputs.sample_slots[: len(sampled)].tolist() == [rows[r] for r in sampled]
    assert (made.slot_mapping[..., num_tokens:] == -1).all()
    assert (made.positions[num_tokens:] == 0).all()
    assert (inputs.input_ids[num_tokens : padded[1]] == 0).all()
    assert slots.num_computed_tokens[rows].tolist() == seq_lens


def test_an_empty_step_is_all_padding() -> None:
    inputs = StepInputs(RequestSlots(4, 64, 16, CPU), 8, 16, CPU)
    inputs.fill(*[np.empty(0, dtype=np.int64)] * 3, (4, 8))
    made = inputs.common(4, 8)
    assert made.seq_lens.tolist() == [0] * 4
    assert made.query_start_loc.tolist() == [0] * 5
    assert made.slot_mapping.tolist() == [-1] * 8


def test_segments_land_where_they_belong() -> None:
    arena = torch.zeros(5000, dtype=torch.int32)
    values = list(range(1, 3001))
    staged = torch.tensor([7, 4990, 40, 0, 3, 3, 2900, *values[:2900]], dtype=torch.int32)
    expected = arena.clone()
    expected[7:10] = torch.tensor(values[:3], dtype=torch.int32)
    expected[40:2937] = torch.tensor(values[3:2900], dtype=torch.int32)
    write_segments(arena, staged, 3)
    assert arena.tolist() == expected.tolist()


def test_ring_reuses_its_buffers_in_turn_and_grows() -> None:
    ring = PinnedRing(CPU, size=4, depth=2)
    parts = [torch.arange(n, dtype=torch.int32).numpy() for n in (3, 9, 2)]
    seen = []
    for part in (*parts, *parts):
        buffer = ring.stage([part, part])
        assert buffer[: 2 * len(part)].tolist() == [*part, *part]
        seen.append(buffer.data_ptr())
        ring.release()
    assert seen[1] == seen[3] == seen[5]


def prepare_case(block_size: int) -> Case:
    """As StepInputs launches it, with a history and a table whose widths divide by nothing."""
    groups = 6 if block_size == 16 else 1
    options = {"BLOCK_SIZE": block_size, "BLOCK": BLOCK, "GROUPS": groups, "num_warps": 4}
    types = {
        name: "i32" if name in NUMBERS else "*i64" if name in WIDE else "*i32"
        for name in _prepare.arg_names
        if name not in options
    }
    return Case.of_launch(_prepare, types, options, f"prepare {block_size}")


def test_kernels_compile_for_hopper() -> None:
    types = {"arena": "*i32", "staged": "*i32", "num_segments": "i32"}
    write = Case.of_launch(_write_segments, types, {"BLOCK": BLOCK, "num_warps": 4}, "write")
    kernels = compile_cases([write, *map(prepare_case, GPU_BLOCK_SIZES)])
    for label, kernel in kernels.items():
        assert kernel.spill_bytes == 0, label
        assert kernel.shared_bytes == 0, label
        assert kernel.registers <= 64, f"{label}: {kernel.registers}"  # all slots of an SM at once
        assert "div." not in kernel.ptx, label  # block sizes are powers of two
