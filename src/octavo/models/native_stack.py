"""All layers of a decoder as one call into the CPU's own kernels (kernels/cpu/stack.c).

Between the kernels of a layer Python would cost as much as the small ones themselves. Where a layer's
MLP is a mixture of experts, the call ends before it and the next one begins after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from octavo.config.model import ModelConfig
from octavo.kernels.cpu.native import CpuKernels, F, Matrix, N, P
from octavo.layers.attention import StepContext
from octavo.layers.linear import Linear, NativeLinear
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Shape(ctypes.Structure):
    _fields_ = _all(N, "heads kv_heads head_dim block_size")


class _Layer(ctypes.Structure):
    _fields_ = [
        *_all(P, "input_norm attention_out_norm mlp_norm mlp_out_norm q_norm k_norm"),
        *_all(Matrix, "qkv out gate_up down"),
        *_all(N, "window group"),
    ]


class _Step(ctypes.Structure):
    _fields_ = [*_all(P, "cos sin slots tables"), ("table_stride", N)]


class _Batch(ctypes.Structure):
    _fields_ = [
        *_all(N, "tokens requests hidden gelu unit_offset threads"),
        *_all(P, "starts lens"),
        *_all(F, "eps scale"),
    ]


class NativeStack:
    """Finalized layers as C structures. Keeps them alive."""

    def __init__(
        self, config: ModelConfig, layers: list[Any], group_of: list[int], kernels: CpuKernels
    ) -> None:
        """layers: `DecoderLayer`s whose backends are NativeAttention; group_of: each one's KV group."""
        self._config, self._kernels, self._layers = config, kernels, layers
        self._scale = layers[0].self_attn.scale
        mlps = [layer.mlp for layer in layers]
        self._sparse = [mlp if isinstance(mlp, MixtureOfExperts) else None for mlp in mlps]
        described = [_describe(layer, group) for layer, group in zip(layers, group_of, strict=True)]
        self._described = (_Layer * len(layers))(*described)
        self._widths = (
            max(max(one.qkv.columns, one.gate_up.columns) for one in described),
            max(max(one.out.depth, one.down.depth) for one in described),
        )

    def run(
        self, embedded: torch.Tensor, kv_caches: Sequence[torch.Tensor], steps: list[StepContext]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded: (T, hidden_size), overwritten; steps: one a KV group.

        Returns the last layer's output and the residual that it is not yet added to.
        """
        config, common = self._config, steps[0].common
        tokens = len(embedded)
        x, normed = torch.empty_like(embedded), torch.empty_like(embedded)
        wide, narrow = (embedded.new_empty(tokens, width) for width in self._widths)
        caches = (P * len(kv_caches))(*[cache.data_ptr() for cache in kv_caches])
        block_size = kv_caches[0].shape[-1] // config.head_dim
        shape = _Shape(config.num_heads, config.num_kv_heads, config.head_dim, block_size)
        starts, lens = common.query_start_loc.contiguous(), common.seq_lens.contiguous()
        batch = _Batch(
            *(tokens, len(common.seq_lens), config.hidden_size, config.gelu),
            *(config.norm_unit_offset, torch.get_num_threads()),
            *(starts.data_ptr(), lens.data_ptr()),
            *(config.rms_norm_eps, self._scale),
        )
        slots = [step.common.slot_mapping.contiguous() for step in steps]
        tables = [step.common.block_tables.contiguous() for step in steps]
        assert {each.dtype for each in (starts, lens, *tables)} == {torch.int32}
        assert {each.dtype for each in slots} == {torch.int64}
        shared = (_Step * len(steps))(*map(_step, steps, slots, tables))
        buffers = (P * 3)(normed.data_ptr(), wide.data_ptr(), narrow.data_ptr())
        first = 0
        for last, sparse in enumerate(self._sparse, 1):
            if sparse or last == len(kv_caches):
                rows = (x.data_ptr(), embedded.data_ptr(), buffers)
                step = (caches, shared, ctypes.byref(shape), ctypes.byref(batch))
                self._kernels.run_layers(*rows, self._described, first, last, *step)
                first = last
            if sparse:
                x = sparse(normed, slots[0])
        return x, embedded


def _describe(layer: Any, group: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (
        *(layer.input_layernorm, layer.attention_out_norm),
        *(layer.post_attention_layernorm, layer.mlp_out_norm, attention.q_norm, attention.k_norm),
    )
    products = [_matrix(attention.qkv_proj), _matrix(attention.o_proj)]
    if not isinstance(mlp, MixtureOfExperts):
        products += [_matrix(mlp.gate_up_proj), _matrix(mlp.down_proj)]
    else:  # run by torch: the last two products have no weights
        assert layer.mlp_out_norm is None, "nothing would apply it"
        products += [Matrix(), Matrix()]
    return _Layer(*map(_weight, norms), *products, attention.backend.window, group)


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _matrix(linear: Linear) -> Matrix:
    assert isinstance(linear.kernel, NativeLinear)
    return linear.kernel.matrix


def _step(step: StepContext, slots: torch.Tensor, tables: torch.Tensor) -> _Step:
    pointers = [tensor.data_ptr() for tensor in (*step.rotary_tables, slots, tables)]
    return _Step(*pointers, tables.stride(0))
