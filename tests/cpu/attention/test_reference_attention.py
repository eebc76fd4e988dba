"""The CPU's paged attention against softmax(Q K^T) V without pages, and its promises about bits.

Each test runs with torch's backend and, where block sizes allow it, with our own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.reference import ReferenceAttention, rows_agree
from octavo.config.kv_cache import KVCacheSpec
from tests.cpu.native_ops import PagedAttention
from tests.cpu.paged import BlockTables, assert_close, assert_same_bits, common_metadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64
SCALE = HEAD_DIM**-0.5


class Fixture:
    """Random q, k, v for some requests, a cache, and steps over them."""

    native = False
    threads = 1

    def __init__(
        self,
        lengths: Sequence[int],
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        stale: float = 0.0,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        self.spec = KVCacheSpec(block_size, NUM_KV_HEADS, HEAD_DIM, dtype.itemsize)
        self.window = window
        self.backend: ReferenceAttention | PagedAttention
        if self.native and block_size % 16 == 0:
            self.backend = PagedAttention(NUM_HEADS, self.spec, dtype, window, self.threads)
        else:
            self.backend = ReferenceAttention(NUM_HEADS, self.spec, window)

        def random(length: int, heads: int) -> torch.Tensor:
            return torch.randn(length, heads, HEAD_DIM, generator=generator).to(dtype)

        self.q = [random(length, NUM_HEADS) for length in lengths]
        self.k = [random(length, NUM_KV_HEADS) for length in lengths]
        self.v = [random(length, NUM_KV_HEADS) for length in lengths]
        num_blocks = sum(-(-length // block_size) for length in lengths) + 5
        self.blocks = BlockTables(num_blocks, block_size, seed=len(lengths))
        for length in lengths:
            self.blocks.add(length)
        self.cache = torch.full(self.backend.kv_cache_shape(num_blocks, self.spec), stale).to(dtype)
        self.cache[0] = 0
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Run the next counts[r] tokens of each request r."""
        slices = {r: slice(self.done[r], self.done[r] + n) for r, n in counts.items()}
        for r, n in counts.items():
            self.done[r] += n
        common = common_metadata(
            list(counts.values()),
            [self.done[r] for r in counts],
            [self.blocks.tables[r] for r in counts],
            self.spec.block_size,
        )
        q, k, v = (
            torch.cat([tensors[r][rows] for r, rows in slices.items()])
            for tensors in (self.q, self.k, self.v)
        )
        out = self.write_and_attend(common, q, k, v)
        return dict(zip(counts, torch.split(out, list(counts.values())), strict=True))

    def write_and_attend(
        self, common: CommonAttentionMetadata, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(self.backend, PagedAttention):
            qkv = torch.cat((q, k, v), 1).flatten(1)
            still = torch.ones(len(q), 1, HEAD_DIM // 2), torch.zeros(len(q), 1, HEAD_DIM // 2)
            self.backend.write(qkv, still, self.cache, common)
            return self.backend.attend(qkv, self.cache, common, SCALE)
        metadata = self.backend.build_metadata(common)
        self.backend.write(k, v, self.cache, metadata)
        return self.backend.attend(q, self.cache, metadata, SCALE)

    def run(self, request: int, chunks: Sequence[int]) -> torch.Tensor:
        """All tokens of one request, alone, in chunks."""
        return torch.cat([self.step({request: n})[request] for n in chunks])

    def expected(self, request: int) -> torch.Tensor:
        """Without pages, splits or items, in double."""
        q, k, v = (t[request].double().transpose(0, 1) for t in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * SCALE
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        if self.window:
            mask = mask.triu(1 - self.window)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)


@pytest.fixture(params=[False, True], ids=["torch", "native"], autouse=True)
def _backends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixture, "native", request.param)


LENGTHS = (1, 5, 16, 17, 255, 256, 257, 300, 513, 700)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_ragged_batch_equals_unpaged(block_size: int) -> None:
    """All requests prefilled in one step."""
    fixture = Fixture(LENGTHS, block_size)
    out = fixture.step(dict(enumerate(LENGTHS)))
    for request, got in out.items():
        assert_close(got, fixture.expected(request), 3e-6)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunked_batch_with_decodes_equals_unpaged(block_size: int) -> None:
    """Chunks that start inside blocks and splits, beside requests that decode."""
    fixture = Fixture((700, 300, 40), block_size)
    parts: list[list[torch.Tensor]] = [[], [], []]
    plan = [{0: 250, 1: 299, 2: 7}, {0: 13, 2: 1, 1: 1}, {2: 1, 0: 430}, {2: 31}, {0: 7}]
    for counts in plan:
        for request, got in fixture.step(counts).items():
            parts[request].append(got)
    for request, pieces in enumerate(parts):
        assert_close(torch.cat(pieces), fixture.expected(request), 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_solo_batched_chunked_and_decoded_have_equal_bits(dtype: torch.dtype) -> None:
    """Chunks of 7, 37, 64 and 501, one token at a time, another block size, and batch mates."""
    lengths = (600, 90, 333)
    expected = Fixture(lengths, 16, dtype).run(0, [600])
    for chunk in (7, 37, 64, 501):
        sizes = [end - start for start, end in pairwise([*range(0, 600, chunk), 600])]
        assert_same_bits(Fixture(lengths, 16, dtype).run(0, sizes), expected)
    # Decode, across the border of two splits.
    assert_same_bits(Fixture(lengths, 16, dtype).run(0, [240, *[1] * 40, 320]), expected)
    assert_same_bits(Fixture(lengths, 32, dtype).run(0, [300, 300]), expected)
    if not Fixture.native:  # our kernels leave such blocks to torch, which has other bits
        assert_same_bits(Fixture(lengths, 8, dtype).run(0, [599, 1]), expected)
    fixture = Fixture(lengths, 16, dtype)
    got = [fixture.step(counts)[0] for counts in ({2: 300, 0: 500, 1: 89}, {1: 1, 0: 100, 2: 33})]
    assert_same_bits(torch.cat(got), expected)


@pytest.mark.parametrize("window", [1, 40, 255, 256, 257, 300, 699, 5000])
def test_window_equals_unpaged(window: int) -> None:
    """A token sees `window` keys, its own the last; all requests at once, then in chunks."""
    lengths = (1, 17, 300, 700)
    fixture = Fixture(lengths, window=window)
    for request, got in fixture.step(dict(enumerate(lengths))).items():
        assert_close(got, fixture.expected(request), 3e-6)
    fixture = Fixture(lengths, window=window)
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for counts in ({3: 690, 1: 5}, {3: 1, 1: 12, 2: 299}, {2: 1, 0: 1, 3: 9}):
        for request, got in fixture.step(counts).items():
            parts[request].append(got)
    for request, pieces in enumerate(parts):
        assert_close(torch.cat(pieces), fixture.expected(request), 3e-6)


@pytest.mark.parametrize("window", [1, 40, 256, 300])
def test_window_keeps_bits_whatever_runs_beside(window: int) -> None:
    """Which splits an item needs depends on its rows; chunks, batch mates and decodes agree."""
    lengths = (600, 90, 333)
    expected = Fixture(lengths, window=window).run(0, [600])
    for sizes in ([37] * 16 + [8], [501, 99], [240, *[1] * 40, 320], [599, 1]):
        assert_same_bits(Fixture(lengths, window=window).run(0, sizes), expected)
    assert_same_bits(Fixture(lengths, 32, window=window).run(0, [300, 300]), expected)
    fixture = Fixture(lengths, window=window)
    got = [fixture.step(counts)[0] for counts in ({2: 300, 0: 500, 1: 89}, {1: 1, 0: 100, 2: 33})]
    assert_same_bits(torch.cat(got), expected)


def test_window_that_hides_nothing_changes_no_bit() -> None:
    expected = Fixture((300,)).run(0, [300])
    assert_same_bits(Fixture((300,), window=300).run(0, [300]), expected)


def test_splits_before_the_window_are_skipped() -> None:
    """A decode at position 2,000 with a window of 40 gathers one split; its early blocks are not
    read, so they may hold NaN."""
    fixture, clean = Fixture((2001,), window=40), Fixture((2001,), window=40)
    for one in (fixture, clean):
        one.run(0, [2000])
    for block in fixture.blocks.tables[0][: 1900 // 16]:
        fixture.cache[block] = float("nan")
    common = common_metadata([1], [2001], fixture.blocks.tables, 16)
    if isinstance(fixture.backend, ReferenceAttention):
        [group] = fixture.backend.build_metadata(common).groups
        assert len(group.splits) == 1
    assert_same_bits(fixture.step({0: 1})[0], clean.step({0: 1})[0])


def test_many_keys_cost_no_digits() -> None:
    """A mean of 3,000 equal values: one chain of additions over all of them would be 3e-5 off."""
    fixture = Fixture((3000,))
    fixture.q[0].zero_()
    fixture.v[0].fill_(0.1)
    got = fixture.run(0, [1500, 1499, 1])
    assert_close(got, torch.full_like(got, 0.1).double(), 3e-6)


def test_stale_nan_in_unowned_slots_reaches_nothing() -> None:
    """Every slot that no token of these requests has written is NaN, also in their own blocks."""
    lengths = (20, 300, 1)
    clean, poisoned = Fixture(lengths), Fixture(lengths, stale=float("nan"))
    for counts in ({0: 19, 1: 290}, {1: 9, 2: 1}, {0: 1, 1: 1}):
        expected, got = clean.step(counts), poisoned.step(counts)
        for request in counts:
            assert_same_bits(got[request], expected[request])


def test_nan_of_one_request_stays_with_it() -> None:
    fixture, clean = Fixture((40, 40)), Fixture((40, 40))
    fixture.k[0][3] = float("nan")
    got, expected = fixture.step({0: 40, 1: 40}), clean.step({0: 40, 1: 40})
    assert_same_bits(got[1], expected[1])
    assert torch.isnan(got[0][3:]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_reaches_only_rows_that_see_it(
    bad: float, name: str, window: int | None, dtype: torch.dtype
) -> None:
    """One number of one key or value: NaN in the heads of its kv head from its token on, as long as it
    is in the window; every other row has the bits of a clean run, however the request is cut."""
    token, length = 70, 200
    clean = Fixture((length, 9), 16, dtype, window=window).run(0, [length])
    until = length if window is None else token + window
    for chunks in ([length], [71, 1, 128], [64, 64, 72]):
        fixture = Fixture((length, 9), 16, dtype, window=window)
        getattr(fixture, name)[0][token, 1, 5] = bad
        got = fixture.run(0, chunks)
        seen = got[token:until, 3:].isnan()
        if name == "k" and math.isinf(bad):  # half the scores are -inf, a weight of zero
            assert seen.any()
        else:
            assert seen.all()
        rest = got.clone()
        rest[token:until, 3:] = clean[token:until, 3:]
        assert_same_bits(rest, clean)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {0: 300, 1: 90, 2: 1}
    expected = Fixture((300, 90, 1)).step(plan)
    monkeypatch.setattr(Fixture, "threads", 3)
    for request, got in Fixture((300, 90, 1)).step(plan).items():
        assert_same_bits(got, expected[request])


def test_padding_tokens_write_nothing_and_return_zero() -> None:
    """Slot -1, and rows past the last request."""
    fixture = Fixture((10,), stale=float("nan"))
    common = common_metadata([10], [10], fixture.blocks.tables, 16)
    pad = torch.full((6,), -1)
    padded = type(common)(
        common.query_start_loc,
        common.seq_lens,
        common.block_tables,
        torch.cat((common.slot_mapping, pad)),
        torch.cat((common.positions, pad + 1)),
    )
    q, k, v = (
        torch.cat((t[0], torch.full((6, *t[0].shape[1:]), float("nan"))))
        for t in (fixture.q, fixture.k, fixture.v)
    )
    out = fixture.write_and_attend(padded, q, k, v)
    assert_close(out[:10], fixture.expected(0), 3e-6)
    assert (out[10:] == 0).all()
    assert (fixture.cache[0] == 0).all()


def test_a_block_is_one_contiguous_range() -> None:
    spec = KVCacheSpec(16, 2, 64, 4)
    shape = Fixture((1,)).backend.kv_cache_shape(9, spec)
    cache = torch.zeros(shape)
    assert cache[3].is_contiguous()
    assert cache[3].numel() * cache.element_size() == spec.block_bytes


def test_without_agreement_only_small_items_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where items of 128 rows give other bits, results are right and repeatable."""
    monkeypatch.setattr("octavo.attention.reference.rows_agree", lambda *_: False)
    fixture = Fixture((300,))
    expected = fixture.run(0, [300])
    assert_close(expected, fixture.expected(0), 3e-6)
    assert_same_bits(Fixture((300,)).run(0, [1] * 20 + [280]), expected)


def test_probe_of_item_sizes_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_agree(16, 16, 64)
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: real(a, b) * (1 + 1e-6 * (a.shape[1] > 16)))
    assert not rows_agree(16, 128, 64)
