"""Request slots: rows that never move, deltas applied in one scatter, nothing left behind."""

from __future__ import annotations

import pickle

import torch

from octavo.core.request import EngineRequest
from octavo.core.scheduler_output import NewRequestData, SchedulerOutput
from octavo.sampling_params import SamplingParams
from octavo.worker.forward_batch import build_common_metadata
from octavo.worker.request_slots import RequestSlots

CPU = torch.device("cpu")


def admission(name: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequestData:
    request = EngineRequest(name, tokens[: max(1, len(tokens) - 1)], SamplingParams(), seed=1)
    return NewRequestData(request, tokens, blocks, computed, 1)


def test_rows_hold_what_the_plan_says() -> None:
    slots = RequestSlots(3, 64, 16, CPU)
    plan = SchedulerOutput(
        1, new_requests=[admission("a", [5, 6, 7], [4]), admission("b", [8], [9])]
    )
    assert slots.update(plan) == []
    a, b = slots.slot_of["a"], slots.slot_of["b"]
    assert slots.token_ids[a, :3].tolist() == [5, 6, 7]
    assert slots.num_tokens[[a, b]].tolist() == [3, 1]
    assert slots.num_prompt_tokens[[a, b]].tolist() == [2, 1]
    slots.update(SchedulerOutput(2, new_block_ids={"a": [11, 12]}))
    assert slots.block_tables[0, a].tolist() == [4, 11, 12, 0]
    assert slots.block_tables[0, b].tolist() == [9, 0, 0, 0]
    assert slots.slot_of == {"a": a, "b": b}


def test_freed_slot_is_reused_and_unknown_ids_are_ignored() -> None:
    slots = RequestSlots(1, 32, 16, CPU)
    slots.update(SchedulerOutput(1, new_requests=[admission("a", [5] * 20, [1, 2], 16)]))
    plan = SchedulerOutput(
        2, new_requests=[admission("b", [7], [3])], removed_request_ids=["a", "never-seen"]
    )
    assert slots.update(plan) == [0]
    assert not slots._free
    assert slots.num_computed_tokens.tolist() == [0]
    assert slots.block_tables[0, 0, 0] == 3


def test_metadata_is_exact_from_device_state() -> None:
    """The host passes bounds; positions and lengths come from the slots."""
    slots = RequestSlots(4, 64, 8, CPU)
    plan = SchedulerOutput(
        1,
        new_requests=[
            admission("a", list(range(100, 112)), [3, 5], 8),
            admission("b", list(range(200, 205)), [7]),
        ],
    )
    slots.update(plan)
    rows = torch.tensor([slots.slot_of["a"], slots.slot_of["b"]])
    common, input_ids = build_common_metadata(slots, rows, [4, 3], 14, 8)
    assert input_ids.tolist() == [108, 109, 110, 111, 200, 201, 202]
    assert common.positions.tolist() == [8, 9, 10, 11, 0, 1, 2]
    assert common.query_start_loc.tolist() == [0, 4, 7]
    assert common.seq_lens.tolist() == [12, 3]
    assert common.slot_mapping.tolist() == [40, 41, 42, 43, 56, 57, 58]
    assert common.block_tables.tolist() == [[3, 5], [7, 0]]


def test_plans_are_plain_data() -> None:
    """A plan can cross a process: it survives pickling unchanged."""
    plan = SchedulerOutput(3, [admission("a", [1, 2], [4])], {"b": [5]}, {"a": 2, "b": 1})
    assert pickle.loads(pickle.dumps(plan)) == plan
