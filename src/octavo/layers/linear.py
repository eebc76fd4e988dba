"""Linear layers whose results do not depend on the number of rows, and the CPU way to run them.

`Linear` owns weight and bias (several checkpoint tensors stacked along the output). How the product
is computed is a `LinearKernel`, chosen by `finalize` after loading; docs/architecture.md says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config.engine import LinearBackend
from octavo.kernels.cpu.native import BLOCK_KINDS, DEPTH, LANES, CpuKernels, Matrix, cpu_kernels
from octavo.kernels.triton.linear import fixed_linear

logger = logging.getLogger(__name__)

TILE = 16
"""Rows of the canonical call. All other tiles must give the bits of this one."""
LARGER_TILES = (32, 64, 128, 256, 512)
FLOAT32_SLICE = 128
"""In fp32, K is cut into slices whose products are added in order. One chain over all of K, which is
what oneDNN does, has twice the rounding error; whoever asks for fp32 asks for accuracy."""
# Larger outputs gain nothing from larger tiles and would make the probe slow (lm_head).
MAX_TILE_OUTPUTS = 4 << 20

_NO_LARGER: tuple[int, ...] = (TILE,)

Product = Callable[[torch.Tensor], torch.Tensor]
LinearKernel = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""y = x W^T + b for one loaded weight: (x, out) -> (rows, out_features) in x's dtype, in `out` if given.
A row of y depends only on that row of x, (rows, in_features) for any number of rows."""
PlainFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor
]
"""(x, weight, bias, out) -> out."""


class Linear(nn.Module):
    """A linear layer. `parts` are the output sizes of the checkpoint tensors stacked in it."""

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.parts = parts
        weight = torch.empty(sum(parts), in_features, dtype=dtype, device=device)
        self.weight: nn.Parameter | None = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            empty = torch.empty(sum(parts), dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        self.kernel: LinearKernel | None = None
        self._native: Callable[[Tensor, Tensor | None], NativeLinear] | None = None

    def keep_blocks(self, kind: str) -> int:
        """Before loading: make the weight GGUF blocks of this type, if the CPU's own kernels take them.

        Returns the bytes of a row, of which the weight is then made, or 0.
        """
        if kind not in BLOCK_KINDS or self.weight is None or self.weight.is_cuda:
            return 0
        (rows, columns), kernels = self.weight.shape, cpu_kernels(self.weight.dtype)
        size = columns // DEPTH * BLOCK_KINDS[kind][1]
        if kernels is None or rows % LANES or columns % DEPTH:
            return 0
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=torch.uint8), requires_grad=False)
        self._native = partial(NativeLinear, kernels, kind=kind)
        return size

    def finalize(self, backend: LinearBackend) -> None:
        """Choose the kernel and give it the loaded weight; the CPU's packs it and lets go of it."""
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.data
        self.kernel = (self._native or LINEAR_KERNELS[backend])(self.weight.data, bias)
        self.weight = None

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: (rows, in_features) -> (rows, out_features), same dtype, in `out` if given."""
        assert self.kernel is not None, "finalize() was not called"
        return self.kernel(x, out)


def plain(function: PlainFunction, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """GPU: one function of (x, weight, bias), for weights as they are stored."""
    return lambda x, out: function(x, weight, bias, out)


def cublas_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b by cuBLAS; a row's bits depend on the number of rows."""
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


class TiledLinear:
    """CPU, by torch: cover the rows with calls of fixed sizes that were seen to agree in every bit.

    Neither MKL (fp32) nor oneDNN (bf16) gives a row the same bits for every number of rows, so the
    plain call will not do (docs/log.md, "CPU linears are not row-invariant").
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, in_features = weight.shape
        threads = torch.get_num_threads()
        hint, self.tiles = choose_tiles(self.out_features, in_features, weight.dtype, threads)
        self._product = packed_product(weight, bias, hint)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: (rows, in_features) -> (rows, out_features), same dtype."""
        assert out is None, "the CPU has no graphs to write for"
        rows = x.shape[0]
        padded = (rows + TILE - 1) // TILE * TILE
        if padded != rows:
            x = F.pad(x, (0, 0, 0, padded - rows))
        if padded in self.tiles:
            return self._product(x)[:rows]
        sizes = cover(padded, self.tiles)
        result = x.new_empty(padded, self.out_features)
        for part, target in zip(torch.split(x, sizes), torch.split(result, sizes), strict=True):
            target.copy_(self._product(part))
        return result[:rows]


class NativeLinear:
    """CPU with our own kernels (kernels/cpu), in which no row knows of another."""

    def __init__(
        self, kernels: CpuKernels, weight: Tensor, bias: Tensor | None, kind: str = ""
    ) -> None:
        """kind: of BLOCK_KINDS, if the weight is blocks, (rows, bytes of a row)."""
        number, size = BLOCK_KINDS.get(kind, (0, DEPTH))
        depth = weight.shape[1] // size * DEPTH
        packed, wide = kernels.pack(weight, number, depth), None if bias is None else bias.float()
        pointer = None if wide is None else wide.data_ptr()
        self.matrix = Matrix(packed.data_ptr(), number, pointer, len(weight), depth)
        self._kernels, self._alive = kernels, (packed, wide)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: (rows, in_features) -> (rows, out_features), same dtype."""
        assert out is None, "the CPU has no graphs to write for"
        assert (x.dtype, x.shape[1]) == (self._kernels.dtype, self.matrix.depth)
        return self._kernels.linear(x, self.matrix)


def cpu_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear | TiledLinear:
    """Our own kernel where there is one for this machine and weight."""
    kernels = cpu_kernels(weight.dtype)
    if kernels is None or weight.shape[0] % LANES or weight.shape[1] % DEPTH:
        return TiledLinear(weight, bias)
    return NativeLinear(kernels, weight, bias)


def cover(rows: int, tiles: tuple[int, ...]) -> list[int]:
    """Tile sizes, largest first, that add up to `rows` (a multiple of TILE)."""
    sizes = []
    for tile in sorted(tiles, reverse=True):
        sizes += [tile] * (rows // tile)
        rows %= tile
    return sizes


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None, hint: int) -> Product:
    """x W^T + b from a weight reordered for oneDNN, or F.linear where torch cannot do that.

    `hint`: number of rows that the memory layout is chosen for.
    """
    if not _can_pack(weight.dtype):
        return lambda x: F.linear(x, weight, bias)
    run, reorder = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight
    size = FLOAT32_SLICE if weight.dtype == torch.float32 else weight.shape[1]
    slices = [reorder(part.contiguous(), hint) for part in torch.split(weight, size, 1)]

    def product(x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, size, 1) if len(slices) > 1 else (x,)
        out: torch.Tensor = run(parts[0], slices[0], bias, "none", [], "")
        for part, packed in zip(parts[1:], slices[1:], strict=True):
            out.add_(run(part, packed, None, "none", [], ""))
        return out

    return product


def _can_pack(dtype: torch.dtype) -> bool:
    # Private operators (inductor's freezing uses them): check each before use.
    ops = torch.ops.mkldnn
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return True


@cache
def choose_tiles(
    out_features: int, in_features: int, dtype: torch.dtype, num_threads: int
) -> tuple[int, tuple[int, ...]]:
    """Layout hint and usable tile sizes for a weight shape on this machine, by trying on random data.

    The layout for 16 rows is the fastest at 16 rows; the one for 1 row lets more tiles agree in
    bf16 with AMX. The layout with more usable tiles wins, the first on a tie. Which tiles agree can
    depend on the number of threads (the bits of the canonical tile do not), so steps must run with
    as many as the loader had: `num_threads`.
    """
    candidates = [tile for tile in LARGER_TILES if tile * out_features <= MAX_TILE_OUTPUTS]
    if not candidates:  # a large vocabulary: trying would only take its memory once more
        return TILE, _NO_LARGER
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(out_features, in_features).uniform_(-1, 1, generator=generator).to(dtype)
    rows = max(candidates)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    best_hint, best = TILE, _NO_LARGER
    for hint in (TILE, 1):
        usable = _agreeing_tiles(packed_product(weight, None, hint), x, candidates)
        if len(usable) > len(best):
            best_hint, best = hint, usable
        if len(usable) == len(candidates) + 1:
            break
    logger.debug("linear %dx%d %s: tiles %s", out_features, in_features, dtype, best)
    return best_hint, best


def _agreeing_tiles(product: Product, x: torch.Tensor, candidates: list[int]) -> tuple[int, ...]:
    """The canonical tile and those candidates that give its bits, also with the rows moved."""
    expected = torch.cat([product(part) for part in torch.split(x, TILE)])

    def agrees(tile: int) -> bool:
        straight = torch.cat([product(part) for part in torch.split(x, tile)])
        moved = torch.cat([product(part) for part in torch.split(x.roll(7, 0), tile)]).roll(-7, 0)
        return torch.equal(straight, expected) and torch.equal(moved, expected)

    if not agrees(TILE):
        logger.warning("a row's bits depend on its place in a call of 16 rows on this machine")
    return (TILE, *(tile for tile in candidates if agrees(tile)))


LINEAR_KERNELS: dict[LinearBackend, Callable[[torch.Tensor, torch.Tensor | None], LinearKernel]] = {
    "tiled": cpu_linear,
    "cublas": partial(plain, cublas_linear),
    "fixed": partial(plain, fixed_linear),
}
"""cublas is the only one whose rows depend on how many there are."""
