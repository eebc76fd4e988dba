"""The sampler on the GPU: the CPU sampler's tokens, the same bits in any batch, and no waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.cpu.sample.helpers import MIX as CPU_MIX
from tests.cpu.sample.helpers import chi_square_z
from torch import Tensor

from octavo.core.request import EngineRequest
from octavo.sample.device_sampler import DeviceSampler
from octavo.sample.sampler import Sampler
from octavo.sample.state import SamplingState
from octavo.sampling_params import SamplingParams

SLOTS = 256
MAX_LEN = 256
EOS = 2
DEVICE = torch.device("cuda")
MIX: list[dict[str, Any]] = [
    *CPU_MIX,
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "logprobs": 20},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 3000, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1e-4, "min_p": 0.5},
    {"temperature": 5.0, "top_k": 50, "top_p": 0.5},
]
ALL_SCORES, ALLOWED, WORDS = 8, 9, 11  # where logprobs=-1, allowed_token_ids and words are


def request(seed: int, **params: Any) -> EngineRequest:
    words = params.pop("words", ())
    return EngineRequest(
        "r",
        [1],
        SamplingParams(max_tokens=None, **params),
        seed=seed,
        eos_token_ids=(EOS,),
        bad_words_token_ids=words,
    )


@dataclass
class Requests:
    """Requests in slots, on the host and on the GPU."""

    vocab: int
    mix: list[dict[str, Any]]
    host: SamplingState = field(init=False)
    device: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.vocab)
        self.host = SamplingState(SLOTS, self.vocab, "cpu")
        self.device = SamplingState(SLOTS, self.vocab, DEVICE)
        for slot in range(SLOTS):
            params = self.mix[slot % len(self.mix)]
            self.host.add(slot, request(slot, **params))
            self.device.add(slot, request(slot, **params))
        # Few token ids, so that histories repeat themselves and end in bad words.
        self.history = torch.randint(0, 9, (SLOTS, MAX_LEN), dtype=torch.int32, generator=generator)
        self.prompt_len = torch.randint(1, 20, (SLOTS,), dtype=torch.int32, generator=generator)
        self.num_tokens = self.prompt_len + torch.randint(
            0, 60, (SLOTS,), dtype=torch.int32, generator=generator
        )
        self.on_device = [t.to(DEVICE) for t in (self.history, self.num_tokens, self.prompt_len)]
        self.sampler = DeviceSampler(SLOTS, self.vocab, DEVICE)

    def launch(self, logits: Tensor, slots: list[int], write_back: bool = False) -> Any:
        rows = torch.tensor(slots, dtype=torch.int32).to(DEVICE)
        return self.sampler.launch(
            logits, slots, rows, self.device, *self.on_device, write_back=write_back
        )

    def sample(self, logits: Tensor, slots: list[int]) -> Any:
        sample = self.launch(logits, slots)
        torch.cuda.synchronize()
        return sample.collect()

    def expected(self, logits: Tensor, slots: list[int]) -> Any:
        return Sampler().sample(
            logits.cpu().float().clone(),
            slots,
            self.host,
            self.history,
            self.num_tokens[slots].long(),
            self.prompt_len[slots].long(),
        )


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, device=DEVICE) * 3
    logits[:, ::7] = -math.inf
    logits[:, :40] += 8  # a head, so that cuts leave few tokens in most rows
    return logits.to(dtype)


def check(requests: Requests, logits: Tensor, slots: list[int]) -> Any:
    expected = requests.expected(logits, slots)
    before = logits.clone()
    found = tokens, errors, logprobs = requests.sample(logits, slots)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the logits were overwritten"
    assert tokens == expected.token_ids.tolist()
    assert errors == expected.errors
    assert set(logprobs) == set(expected.logprobs)
    for row, scores in logprobs.items():
        assert scores.token_ids == expected.logprobs[row].token_ids, row
        assert scores.rank == expected.logprobs[row].rank, row
        torch.testing.assert_close(
            torch.tensor(scores.logprobs),
            torch.tensor(expected.logprobs[row].logprobs),
            rtol=2e-6,
            atol=2e-6,
        )
    return found


@pytest.fixture(scope="module")
def large() -> Requests:
    return Requests(151936, MIX)


def test_mixed_batch_equals_the_cpu_sampler(large: Requests) -> None:
    check(large, random_logits(48, large.vocab, torch.bfloat16), list(range(100, 148)))


def test_mixed_fp32_batch_equals_the_cpu_sampler() -> None:
    requests = Requests(49152, MIX)
    logits = random_logits(128, requests.vocab, torch.float32)
    check(requests, logits, torch.randperm(SLOTS)[:128].tolist())


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_plain_batches_equal_the_cpu_sampler(rows: int) -> None:
    requests = Requests(128256, [{}, {"temperature": 0.0}, {"temperature": 0.5}])
    logits = random_logits(rows, requests.vocab, torch.bfloat16, rows)
    check(requests, logits, list(range(rows)))


def test_each_row_alone_equals_it_in_any_batch(large: Requests) -> None:
    """Tokens and score bits, beside random mates with random features, in any order."""
    logits = random_logits(SLOTS, large.vocab, torch.bfloat16, 5)

    def row_of(found: Any, row: int) -> Any:
        return found[0][row], found[1].get(row), found[2].get(row)

    alone = [row_of(large.sample(logits[i : i + 1], [i]), 0) for i in range(len(MIX))]
    generator = torch.Generator().manual_seed(1)
    for size in (2, 17, 100, 256):
        slots = torch.randperm(SLOTS, generator=generator)[:size].tolist()
        # Rows of -1 (all scores) make the lists of Python long, not the check better.
        slots = [slot for slot in slots if slot < len(MIX) or slot % len(MIX) != ALL_SCORES]
        found = large.sample(logits[slots], slots)
        for row, slot in enumerate(slots):
            if slot < len(MIX):
                assert row_of(found, row) == alone[slot], (size, slot)


def test_failures_stay_in_their_rows(large: Requests) -> None:
    logits = random_logits(32, large.vocab, torch.bfloat16, 7)
    slots = list(range(32))
    before = large.sample(logits, slots)
    bad = {0: math.nan, 2: math.inf, 3: math.nan, 5: -math.inf, 7: math.nan, 8: -math.inf}
    broken = logits.clone()
    for row, value in bad.items():
        broken[row, slice(None) if value == -math.inf else 151000] = value
    broken[ALLOWED, [8, 9, 250]] = -math.inf  # all that the row allows
    tokens, errors, logprobs = check(large, broken, slots)
    assert set(errors) == {*bad, ALLOWED}
    for row in set(slots) - set(errors):
        assert tokens[row] == before[0][row]
        assert logprobs.get(row) == before[2].get(row)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_flat_rows_break_ties_as_the_cpu_does(large: Requests, value: float) -> None:
    """All tokens equal: only noise and token ids decide, and a cut needs many redraws."""
    logits = torch.full((len(MIX), large.vocab), value, dtype=torch.bfloat16, device=DEVICE)
    check(large, logits, list(range(len(MIX), 2 * len(MIX))))


def test_nothing_waits_for_the_device(large: Requests) -> None:
    """Adding a request, planning and launching: torch raises where it would synchronise."""
    logits = random_logits(16, large.vocab, torch.bfloat16)
    slots = list(range(16))
    rows = torch.arange(16, device=DEVICE)
    large.launch(logits, slots)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        large.device.add(0, request(0, **MIX[0]))
        large.device.add(WORDS, request(WORDS, **MIX[WORDS]))
        for _ in range(2):
            large.sampler.launch(
                logits, slots, rows, large.device, *large.on_device, write_back=False
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_write_back_follows_the_distribution() -> None:
    """20,480 draws, 80 steps of 256 requests that live on the device: chi-square, and histories."""
    vocab, steps = 40, 80
    params = {"temperature": 0.8, "top_k": 12, "top_p": 0.95}
    requests = Requests(vocab, [params])
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    logits = row.to(DEVICE).expand(SLOTS, -1).contiguous()
    slots = list(range(SLOTS))

    def step() -> Tensor:
        sample = requests.launch(logits, slots, write_back=True)
        torch.cuda.synchronize()
        return sample.results[:, 0].clone()

    drawn = torch.stack([step() for _ in range(steps)])
    history, num_tokens, _ = (tensor.cpu() for tensor in requests.on_device)
    assert torch.equal(num_tokens, requests.num_tokens + steps)
    for slot in range(SLOTS):
        start = int(requests.num_tokens[slot])
        assert torch.equal(history[slot, start : start + steps], drawn[:, slot])
        assert torch.equal(history[slot, :start], requests.history[slot, :start])

    probabilities = (row.double() / 0.8).softmax(0)
    values, ids = probabilities.topk(12)
    values = values / values.sum()
    left = values.cumsum(0) - values < 0.95
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[ids[left]] = values[left] / values[left].sum() * drawn.numel()
    assert abs(chi_square_z(torch.bincount(drawn.flatten(), minlength=vocab), expected)) < 4.5
