"""The parts of kernels/cpu one by one, as torch functions: for tests against their oracles."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.native import NativeAttention
from octavo.config.kv_cache import KVCacheSpec
from octavo.kernels.cpu.native import CpuKernels, F, N, P, cpu_kernels
from octavo.models.native_stack import _Shape

_I = ctypes.c_int
_REASON = "needs gcc and a processor with AVX-512"
needs_kernels = pytest.mark.skipif(cpu_kernels(torch.float32) is None, reason=_REASON)


def kernels(dtype: torch.dtype) -> CpuKernels:
    found = cpu_kernels(dtype)
    if found is None:
        pytest.skip(_REASON)
    return found


def _function(dtype: torch.dtype, name: str, *types: Any) -> Any:
    function = getattr(kernels(dtype)._library, name)
    function.argtypes = types
    return function


def _pointer(x: torch.Tensor | None) -> int | None:
    if x is None:
        return None
    assert x.is_contiguous()
    return x.data_ptr()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
    threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference_rms_norm`."""
    run = _function(x.dtype, "rms_norm", *[P] * 5, N, N, F, _I, _I)
    out, total = torch.empty_like(x), torch.empty_like(x)
    tensors = [_pointer(one) for one in (out, total, x, residual, weight)]
    run(*tensors, *x.shape, eps, unit_offset, threads)
    return out, x if residual is None else total


def silu_and_mul(x: torch.Tensor, gelu: bool = False, threads: int = 1) -> torch.Tensor:
    """As `reference_silu_and_mul`."""
    run = _function(x.dtype, "silu_and_mul", P, P, N, N, _I, _I)
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    run(_pointer(out), _pointer(x), *out.shape, gelu, threads)
    return out


@dataclass
class PagedAttention:
    """Rotation, cache write and attention of a layer."""

    num_heads: int
    spec: KVCacheSpec
    dtype: torch.dtype
    window: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        self.layout = NativeAttention(kernels(self.dtype), self.window)
        sizes = self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size
        self._shape = _Shape(self.num_heads, *sizes)

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        return self.layout.kv_cache_shape(num_blocks, spec)

    def write(
        self,
        qkv: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor,
        common: CommonAttentionMetadata,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
        unit_offset: bool = False,
    ) -> None:
        """qkv: (T, all heads * head_dim), overwritten; norms: weights for q and k."""
        run = _function(self.dtype, "rotate_and_write", *[P] * 5, F, _I, P, P, P, N, _I)
        weights = [_pointer(one) for one in norms or (None, None)]
        run(
            _pointer(qkv), *map(_pointer, tables), *weights, eps, unit_offset,
            _pointer(common.slot_mapping), _pointer(cache), ctypes.addressof(self._shape),
            len(qkv), self.threads,
        )  # fmt: skip

    def attend(
        self, qkv: torch.Tensor, cache: torch.Tensor, common: CommonAttentionMetadata, scale: float
    ) -> torch.Tensor:
        """(T, num_heads, head_dim) for the queries in qkv."""
        run = _function(self.dtype, "attend", P, P, N, *[P] * 4, N, N, N, P, F, N, _I)
        out = qkv.new_empty(len(qkv), self.num_heads, self.spec.head_dim)
        assert run(
            _pointer(out), _pointer(qkv), qkv.shape[1], _pointer(cache),
            _pointer(common.query_start_loc), _pointer(common.seq_lens),
            _pointer(common.block_tables), common.block_tables.shape[1], len(common.seq_lens),
            len(qkv), ctypes.addressof(self._shape), scale, self.layout.window, self.threads,
        )  # fmt: skip
        return out
