"""The Triton attention backend in the interpreter: right results, and nothing read that is stale."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton_paged import TritonAttention
from octavo.config.kv_cache import KVCacheSpec
from octavo.errors import ConfigError, KernelError
from octavo.kernels.triton import attention_plan
from tests.cpu.kernels.triton.interpreter_repairs import repair
from tests.cpu.paged import BlockTables, assert_close, assert_same_bits, common_metadata

repair()

CPU = torch.device("cpu")
NAN = float("nan")
# bf16 weights of a softmax: 2^-9 of values around 1, and the rounding of the result.
TOLERANCE = 0.02


class Fixture:
    """Random q, k, v for some requests, a cache in which all else is NaN, and steps over them."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.num_heads, num_kv_heads = heads
        self.window, self.scale = window, head_dim**-0.5
        self.spec = KVCacheSpec(block_size, num_kv_heads, head_dim, dtype.itemsize)
        self.backend = TritonAttention(self.num_heads, self.spec, 8, 2048, CPU, window)

        def random(length: int, count: int) -> torch.Tensor:
            return torch.randn(length, count, head_dim, generator=generator).to(dtype)

        self.q = [random(length, self.num_heads) for length in lengths]
        self.k = [random(length, num_kv_heads) for length in lengths]
        self.v = [random(length, num_kv_heads) for length in lengths]
        num_blocks = sum(-(-length // block_size) for length in lengths) + 3
        self.blocks = BlockTables(num_blocks, block_size, seed=len(lengths))
        for length in lengths:
            self.blocks.add(length)
        shape = self.backend.kv_cache_shape(num_blocks, self.spec)
        self.cache = torch.full(shape, NAN, dtype=dtype)
        self.done = [0] * len(lengths)

    def common(self, counts: dict[int, int]) -> CommonAttentionMetadata:
        """Metadata of the next counts[r] tokens of each request r, after a write of their K/V."""
        size = self.spec.block_size
        for request, count in counts.items():
            for position in range(self.done[request], self.done[request] + count):
                block = self.blocks.tables[request][position // size]
                self.cache[block, 0, :, position % size] = self.k[request][position]
                self.cache[block, 1, :, position % size] = self.v[request][position]
            self.done[request] += count
        tables = [self.blocks.tables[request] for request in counts]
        lengths = [self.done[request] for request in counts]
        return common_metadata(list(counts.values()), lengths, tables, size)

    def query(self, counts: dict[int, int]) -> torch.Tensor:
        return torch.cat([self.q[r][self.done[r] - n : self.done[r]] for r, n in counts.items()])

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        metadata = self.backend.build_metadata(self.common(counts))
        out = self.backend.attend(self.query(counts), self.cache, metadata, self.scale)
        return dict(zip(counts, torch.split(out, list(counts.values())), strict=True))

    def run(self, request: int, chunks: Sequence[int]) -> torch.Tensor:
        """All tokens of one request, alone, in chunks."""
        return torch.cat([self.step({request: n})[request] for n in chunks])

    def expected(self, request: int) -> torch.Tensor:
        """Without pages, tiles or splits, in double."""
        q, k, v = (t[request].double().transpose(0, 1) for t in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.num_heads // self.spec.num_kv_heads, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * self.scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        if self.window:
            mask &= mask.logical_not().logical_or(mask.triu(1 - self.window))
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1)


@pytest.mark.parametrize("block_size", [16, 128])
def test_prefill_chunks_and_decodes_in_one_step_equal_unpaged(block_size: int) -> None:
    fixture = Fixture((300, 40, 23, 1), block_size=block_size)
    plan = [{0: 210, 1: 39}, {0: 1, 2: 23}, {1: 1, 0: 89, 3: 1}]
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: [], 3: []}
    for counts in plan:
        for request, got in fixture.step(counts).items():
            parts[request].append(got)
    for request, pieces in parts.items():
        assert_close(torch.cat(pieces).double(), fixture.expected(request), TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((1, 1), 64, torch.bfloat16),
        ((5, 1), 96, torch.float16),
        ((7, 1), 16, torch.bfloat16),
        ((32, 2), 32, torch.float16),
        ((2, 2), 256, torch.bfloat16),
    ],
)
def test_shapes(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    fixture = Fixture((70, 7), heads, head_dim, dtype=dtype)
    first, second = fixture.step({0: 68, 1: 7}), fixture.step({0: 2})
    assert_close(torch.cat((first[0], second[0])).double(), fixture.expected(0), TOLERANCE)
    assert_close(first[1].double(), fixture.expected(1), TOLERANCE)


@pytest.mark.parametrize("window", [1, 50, 300])
def test_sliding_window(window: int) -> None:
    fixture = Fixture((400,), heads=(2, 1), head_dim=16, window=window)
    got = fixture.run(0, [360, 39, 1])
    assert_close(got.double(), fixture.expected(0), TOLERANCE)


def test_keys_before_the_window_are_not_read() -> None:
    fixture = Fixture((600,), heads=(2, 1), head_dim=16, window=100)
    fixture.common({0: 560})
    for block in fixture.blocks.tables[0][: (560 - 100) // 16]:
        fixture.cache[block] = NAN
    got = torch.cat([fixture.step({0: n})[0] for n in (39, 1)])
    assert_close(got.double(), fixture.expected(0)[560:], TOLERANCE)


def test_equals_the_reference_backend() -> None:
    fixture = Fixture((270, 20), block_size=32)
    fixture.common({0: 170})
    counts = {0: 100, 1: 20}
    common = fixture.common(counts)
    query = fixture.query(counts)
    got = fixture.backend.attend(
        query, fixture.cache, fixture.backend.build_metadata(common), fixture.scale
    )
    reference = ReferenceAttention(fixture.num_heads, fixture.spec)
    cache = fixture.cache.transpose(2, 3).contiguous()
    cache[0] = 0
    expected = reference.attend(query, cache, reference.build_metadata(common), fixture.scale)
    assert_close(got.double(), expected.double(), TOLERANCE)


def test_padding_is_zero_and_its_nan_reaches_nothing() -> None:
    """As under a captured graph: requests of no tokens, tokens of no request, wider table rows."""
    counts = {0: 70, 1: 1}
    plain, padded = Fixture((70, 300)), Fixture((70, 300))
    for fixture in (plain, padded):
        fixture.common({1: 299})
    expected = plain.step(counts)
    common = padded.common(counts)
    tables = torch.full((5, 2 * common.block_tables.shape[1]), 10**6, dtype=torch.int32)
    tables[:2, : common.block_tables.shape[1]] = common.block_tables
    common = CommonAttentionMetadata(
        torch.cat((common.query_start_loc, common.query_start_loc[-1:].expand(3))),
        torch.cat((common.seq_lens, torch.zeros(3, dtype=torch.int32))),
        tables[:, : common.block_tables.shape[1]],
        torch.cat((common.slot_mapping, torch.full((9,), -1))),
        torch.cat((common.positions, torch.zeros(9, dtype=torch.int64))),
    )
    rows = padded.query(counts)
    query = torch.cat((rows, rows.new_full((9, *rows.shape[1:]), NAN)))
    metadata = padded.backend.build_metadata(common)
    out = padded.backend.attend(query, padded.cache, metadata, padded.scale)
    assert_same_bits(out[:71], torch.cat((expected[0], expected[1])))
    assert (out[71:] == 0).all()
    nobody = padded.backend.build_metadata(
        CommonAttentionMetadata(
            torch.zeros(6, dtype=torch.int32),
            torch.zeros(5, dtype=torch.int32),
            *(common.block_tables, common.slot_mapping, common.positions),
        )
    )
    assert (padded.backend.attend(query, padded.cache, nobody, padded.scale) == 0).all()


def test_splits_apart_and_in_turn_have_equal_bits() -> None:
    """In one kernel, whose products have one shape: NumPy's bits may depend on it."""
    fixture = Fixture((700,), heads=(2, 1), head_dim=16)
    fixture.common({0: 699})
    common = fixture.common({0: 1})
    query = fixture.query({0: 1})
    plan = fixture.backend.build_metadata(common)
    first_partial = 2 * fixture.backend.shape.capacity
    assert plan.plan[first_partial] == 0
    apart = fixture.backend.attend(query, fixture.cache, plan, fixture.scale)
    # No room for partial results.
    attention_plan.plan_attention(
        common.query_start_loc, common.seq_lens, plan.plan, 4, 0, fixture.backend.shape
    )
    assert plan.plan[first_partial] == -1
    in_turn = fixture.backend.attend(query, fixture.cache, plan, fixture.scale)
    assert_same_bits(in_turn, apart)
    assert_close(apart[0].double(), fixture.expected(0)[699], TOLERANCE)


def test_launches_leave_the_workspace_as_it_was() -> None:
    """More items than programs, and splits apart: tickets and arrivals return to zero."""
    fixture = Fixture((700, 300), heads=(4, 4), head_dim=16)
    fixture.common({0: 690, 1: 290})
    got = fixture.step({0: 10, 1: 10})
    for request in (0, 1):
        assert_close(got[request].double(), fixture.expected(request)[-10:], TOLERANCE)
    assert not fixture.backend._workspace.tickets.any()
    assert not fixture.backend._workspace.arrivals.any()


def test_bad_shapes_are_refused() -> None:
    def build(heads: int, spec: KVCacheSpec) -> TritonAttention:
        return TritonAttention(heads, spec, 4, 64, CPU)

    for heads, spec in (
        (5, KVCacheSpec(16, 2, 64, 2)),
        (34, KVCacheSpec(16, 2, 64, 2)),
        (2, KVCacheSpec(16, 2, 40, 2)),
        (2, KVCacheSpec(16, 2, 512, 2)),
        (2, KVCacheSpec(8, 2, 64, 2)),
        (2, KVCacheSpec(48, 2, 64, 2)),
    ):
        with pytest.raises(ConfigError):
            build(heads, spec)
    fixture = Fixture((4,))
    common = fixture.common({0: 4})
    metadata = fixture.backend.build_metadata(common)
    for query in (
        fixture.query({0: 4}).float(),
        fixture.query({0: 4})[:, :4],
        fixture.query({0: 4}).transpose(1, 2).contiguous().transpose(1, 2),
    ):
        with pytest.raises(KernelError):
            fixture.backend.attend(query, fixture.cache, metadata, 1.0)
    with pytest.raises(KernelError):
        fixture.backend.attend(fixture.query({0: 4}), fixture.cache.transpose(2, 3), metadata, 1.0)
    with pytest.raises(KernelError):
        fixture.backend.attend(fixture.query({0: 4}), fixture.cache, metadata, -1.0)
    many = CommonAttentionMetadata(
        torch.zeros(18, dtype=torch.int32),
        torch.zeros(17, dtype=torch.int32),
        *(common.block_tables, common.slot_mapping, common.positions),
    )
    with pytest.raises(KernelError):
        fixture.backend.build_metadata(many)
