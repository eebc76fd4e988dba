"""Paged attention on the GPU: right against double, and equal bits however a sequence is cut up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.triton_paged import TritonAttention
from octavo.config.kv_cache import KVCacheSpec

NAN = float("nan")
MAX_SEQS, MAX_LEN = 256, 8192


@dataclass(frozen=True)
class Layer:
    """Shape of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    block_size: int = 16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def spec(self) -> KVCacheSpec:
        return KVCacheSpec(self.block_size, self.kv_heads, self.head_dim, self.dtype.itemsize)

    def backend(self) -> TritonAttention:
        return TritonAttention(
            self.heads, self.spec, MAX_SEQS, MAX_LEN, torch.device("cuda"), self.window
        )


LAYERS = {
    "8B": Layer(32, 8, 128),
    "0.6B": Layer(16, 8, 128),
    "smol": Layer(9, 3, 64),
    "d96 fp16": Layer(32, 32, 96, torch.float16),
    "d256": Layer(8, 4, 256),
    "window fp16": Layer(32, 8, 128, torch.float16, window=300),
}


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


class Sequences:
    """Requests of given lengths with random q, k, v, and a cache that is NaN where nobody has written."""

    def __init__(
        self, layer: Layer, lengths: Sequence[int], num_blocks: int = 0, first_block: int = 1
    ) -> None:
        self.layer, self.backend = layer, layer.backend()
        size, dim, dtype = layer.block_size, layer.head_dim, layer.dtype
        self.q = [noise((n, layer.heads, dim), dtype, 3 * i) for i, n in enumerate(lengths)]
        self.k = [noise((n, layer.kv_heads, dim), dtype, 3 * i + 1) for i, n in enumerate(lengths)]
        self.v = [noise((n, layer.kv_heads, dim), dtype, 3 * i + 2) for i, n in enumerate(lengths)]
        counts = [-(-n // size) for n in lengths]
        num_blocks = num_blocks or first_block + sum(counts)
        shape = self.backend.kv_cache_shape(num_blocks, layer.spec)
        self.cache = torch.full(shape, NAN, dtype=dtype, device="cuda")
        order = torch.randperm(num_blocks - first_block, generator=torch.Generator().manual_seed(7))
        free = iter((order + first_block).split(1))
        width = max(counts) + 5
        self.tables = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
        for request, count in enumerate(counts):
            self.tables[request, :count] = torch.cat([next(free) for _ in range(count)])
        self.tables = self.tables.cuda()
        self.done = [0] * len(lengths)

    def write(self, counts: dict[int, int]) -> None:
        """K and V of the next counts[r] tokens of each request r."""
        size = self.layer.block_size
        for request, count in counts.items():
            rows = slice(self.done[request], self.done[request] + count)
            position = torch.arange(rows.start, rows.stop, device="cuda")
            block = self.tables[request, position // size].long()
            self.cache[block, 0, :, position % size] = self.k[request][rows]
            self.cache[block, 1, :, position % size] = self.v[request][rows]
            self.done[request] = rows.stop

    def inputs(self, counts: dict[int, int]) -> tuple[torch.Tensor, CommonAttentionMetadata]:
        """Query and metadata of the tokens written last."""
        starts = torch.tensor([0, *counts.values()], dtype=torch.int32).cumsum(0)
        lengths = torch.tensor([self.done[r] for r in counts], dtype=torch.int32)
        parts = [self.q[r][self.done[r] - n : self.done[r]] for r, n in counts.items()]
        unused = torch.zeros(sum(counts.values()), dtype=torch.int64, device="cuda")
        common = CommonAttentionMetadata(
            starts.to("cuda", torch.int32),
            lengths.cuda(),
            self.tables[list(counts)],
            unused,
            unused,
        )
        return torch.cat(parts), common

    def attend(self, query: torch.Tensor, common: CommonAttentionMetadata) -> torch.Tensor:
        metadata = self.backend.build_metadata(common)
        return self.backend.attend(query, self.cache, metadata, self.layer.scale)

    def step(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        self.write(counts)
        out = self.attend(*self.inputs(counts))
        return dict(zip(counts, out.split(list(counts.values())), strict=True))

    def run(self, chunks: Sequence[int], request: int = 0) -> torch.Tensor:
        return torch.cat([self.step({request: count})[request] for count in chunks])

    def expected(self, request: int) -> torch.Tensor:
        """Softmax of the whole sequence in double, without pages."""
        layer = self.layer
        group = layer.heads // layer.kv_heads
        q, k, v = (t[request].double().transpose(0, 1) for t in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        distance = torch.arange(q.shape[1], device="cuda")
        distance = distance[:, None] - distance
        hidden = distance < 0
        if layer.window:
            hidden |= distance >= layer.window
        scores = (q @ k.transpose(1, 2) * layer.scale).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of weights and result."""
    unit = torch.finfo(got.dtype).eps
    error = (got.double() - expected).abs()
    assert bool(torch.isfinite(got).all())
    assert bool((error <= unit * (expected.abs() + 2)).all()), error.max().item()


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert bool(torch.isfinite(got).all())
    different = (got != expected).flatten(1).any(1).nonzero().flatten()
    assert not len(different), (
        f"{len(different)} of {len(got)} tokens, first {different[:5].tolist()}"
    )


def even(length: int, chunk: int) -> list[int]:
    return [min(chunk, length - start) for start in range(0, length, chunk)]


@pytest.mark.parametrize("name", LAYERS)
def test_mixed_steps_equal_double(name: str) -> None:
    lengths = (1, 16, 63, 64, 65, 255, 256, 257, 900, 1500)
    sequences = Sequences(LAYERS[name], lengths)
    parts: dict[int, list[torch.Tensor]] = {r: [] for r in range(len(lengths))}
    chooser = random.Random(1)
    while left := [r for r, n in enumerate(lengths) if sequences.done[r] < n]:
        counts = {}
        for request in chooser.sample(left, min(len(left), 6)):
            rest = lengths[request] - sequences.done[request]
            counts[request] = min(rest, chooser.choice([1, 1, 5, 30, 200, 1000]))
        for request, got in sequences.step(counts).items():
            parts[request].append(got)
    for request, pieces in parts.items():
        assert_close(torch.cat(pieces), sequences.expected(request))


@pytest.mark.parametrize("name", LAYERS)
def test_prefilled_chunked_and_decoded_have_equal_bits(name: str) -> None:
    length = 2200
    expected = Sequences(LAYERS[name], (length,)).run([length])
    sequences = Sequences(LAYERS[name], (length,))
    assert_close(expected, sequences.expected(0))
    for chunk in (37, 501, 2048):
        sequences.done = [0]
        assert_same_bits(sequences.run(even(length, chunk)), expected)
    # Token by token over the first splits, and over the border of late ones.
    sequences.done = [0]
    assert_same_bits(sequences.run([*[1] * 300, 1700, *[1] * 80, *[4] * 30]), expected)


@pytest.mark.parametrize("name", ["8B", "smol"])
def test_batch_mates_and_padding_change_no_bits(name: str) -> None:
    lengths = (1300, 2000, 700, 90, 1, 1999, 33, 600)
    expected = {r: Sequences(LAYERS[name], lengths).run([n], r) for r, n in enumerate(lengths)}
    sequences = Sequences(LAYERS[name], lengths)
    chooser = random.Random(2)
    while left := [r for r, n in enumerate(lengths) if sequences.done[r] < n]:
        counts = {}
        for request in chooser.sample(left, chooser.randint(1, len(left))):
            rest = lengths[request] - sequences.done[request]
            counts[request] = min(rest, chooser.choice([1, 3, 37, 140, 501]))
        before = {request: sequences.done[request] for request in counts}
        sequences.write(counts)
        query, common = padded(*sequences.inputs(counts), requests=11, tokens=23)
        out = sequences.attend(query, common)
        total = sum(counts.values())
        assert bool((out[total:] == 0).all())
        for (request, count), got in zip(
            counts.items(), out[:total].split(list(counts.values())), strict=True
        ):
            rows = slice(before[request], before[request] + count)
            assert_same_bits(got, expected[request][rows])


def padded(
    query: torch.Tensor, common: CommonAttentionMetadata, requests: int, tokens: int
) -> tuple[torch.Tensor, CommonAttentionMetadata]:
    """With empty requests whose tables are garbage, and NaN tokens."""
    starts, tables = common.query_start_loc, common.block_tables
    slots = torch.cat((common.slot_mapping, common.slot_mapping.new_full((tokens,), -1)))
    common = CommonAttentionMetadata(
        torch.cat((starts, starts[-1:].expand(requests))),
        torch.cat((common.seq_lens, common.seq_lens.new_zeros(requests))),
        torch.cat((tables, tables.new_full((requests, tables.shape[1]), -(2**30)))),
        slots,
        torch.zeros_like(slots),
    )
    return torch.cat((query, query.new_full((tokens, *query.shape[1:]), NAN))), common


def test_partial_results_without_room_have_equal_bits() -> None:
    """Splits apart, in turn for want of a workspace, and a mixture of both."""
    lengths = (2000, 1200, 700)
    sequences = Sequences(LAYERS["8B"], lengths)
    sequences.write({r: n - 3 for r, n in enumerate(lengths)})
    counts = dict.fromkeys(range(3), 3)
    sequences.write(counts)
    inputs = sequences.inputs(counts)
    expected = sequences.attend(*inputs)
    rows = sequences.backend._rows
    for limit in (0, 3 * 32 * 8, rows):
        sequences.backend._rows = limit
        assert_same_bits(sequences.attend(*inputs), expected)
    assert not bool(sequences.backend._workspace.arrivals.any())
    assert not bool(sequences.backend._workspace.tickets.any())


def test_another_block_size_has_equal_bits() -> None:
    layer = LAYERS["8B"]
    expected = Sequences(layer, (1100,)).run([1100])
    other = Sequences(replace(layer, block_size=256), (1100,))
    assert_same_bits(other.run([600, 1, 1, 300, 198]), expected)


def test_blocks_beyond_four_gibibytes() -> None:
    """Offsets of blocks that fit 32 bits neither as bytes nor as numbers."""
    layer = LAYERS["8B"]
    expected = Sequences(layer, (700,)).run([700])
    far = Sequences(layer, (700,), num_blocks=66_200, first_block=66_000)
    assert far.cache[:66_000].numel() > 2**31
    assert_same_bits(far.run([650, 49, 1]), expected)


def test_a_captured_graph_serves_any_lengths() -> None:
    layer, lengths = LAYERS["8B"], (2000, 900, 60, 300, 1)
    eager, replayed = Sequences(layer, lengths), Sequences(layer, lengths)
    requests, tokens, width = 12, 96, replayed.tables.shape[1]
    static = CommonAttentionMetadata(
        torch.zeros(requests + 1, dtype=torch.int32, device="cuda"),
        torch.zeros(requests, dtype=torch.int32, device="cuda"),
        torch.zeros(requests, width, dtype=torch.int32, device="cuda"),
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
    )
    query = torch.zeros(tokens, layer.heads, layer.head_dim, dtype=layer.dtype, device="cuda")
    graph, out = captured(lambda: replayed.attend(query, static))
    plans = [
        {0: 80, 2: 16},
        {0: 1, 1: 1, 2: 1, 3: 1, 4: 1},
        {1: 90},
        {0: 17, 1: 17, 2: 17, 3: 17},
        {3: 5, 0: 1},
    ]
    for sequences in (eager, replayed):
        sequences.write({0: 1800, 1: 600, 3: 200})
    for counts in plans:
        expected = torch.cat(list(eager.step(counts).values()))
        replayed.write(counts)
        total, count = sum(counts.values()), len(counts)
        filled, common = padded(
            *replayed.inputs(counts), requests=requests - count, tokens=tokens - total
        )
        query.copy_(filled)
        static.query_start_loc.copy_(common.query_start_loc)
        static.seq_lens.copy_(common.seq_lens)
        static.block_tables.copy_(common.block_tables)
        out.fill_(NAN)
        graph.replay()
        assert_same_bits(out[:total], expected)
        assert bool((out[total:] == 0).all())


def captured(
    function: Callable[[], torch.Tensor],
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of the call, after one that compiles; and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def test_a_thousand_repeats_are_bit_equal() -> None:
    """Splits of one request arrive in any order; the merge has one."""
    sequences = Sequences(LAYERS["8B"], (2000, 1500))
    sequences.write({0: 1999, 1: 1499})
    counts = {0: 1, 1: 1}
    sequences.write(counts)
    inputs = sequences.inputs(counts)
    first = sequences.attend(*inputs).clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (sequences.attend(*inputs) != first).sum()
    assert int(wrong) == 0
