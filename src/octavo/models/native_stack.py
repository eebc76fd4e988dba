"""All layers of a decoder as one call into the CPU's kernels (kernels/cpu/stack.c).

Between the kernels of a layer Python costs as much as the small ones themselves, and each return to it
waits for the interpreter's lock, which the engine's thread may hold. Only for layers that our kernels
can do entirely; others run module by module, with the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.native import NativeAttention
from octavo.kernels.cpu.native import CpuKernels, HeadShape
from octavo.layers.attention import StepContext
from octavo.layers.linear import AmxLinear, Linear
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm

if TYPE_CHECKING:
    from octavo.models.decoder import DecoderLayer

_P, _N, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


def _all(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Linear(ctypes.Structure):
    _fields_ = [*_all(_P, "packed", "bias"), *_all(_N, "columns", "depth")]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_all(_P, "input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
        *_all(_P, "q_norm", "k_norm"),
        *_all(_Linear, "qkv", "out", "gate_up", "down"),
        *_all(_N, "window", "group"),
    ]


class _Step(ctypes.Structure):
    _fields_ = [*_all(_P, "cos", "sin", "slots", "tables"), *_all(_N, "table_stride")]


class _Batch(ctypes.Structure):
    _fields_ = [
        *_all(_N, "tokens", "requests", "hidden", "gelu", "unit_offset", "threads"),
        *_all(_P, "starts", "lens"),
        *_all(_F, "eps", "scale"),
    ]


class NativeStack:
    """The layers as C structures. Keeps their weights alive."""

    def __init__(
        self, layers: Sequence[DecoderLayer], group_of: Sequence[int], kernels: CpuKernels
    ) -> None:
        self._kernels, self._weights = kernels, layers
        first = layers[0].self_attn
        assert isinstance(first.backend, NativeAttention)
        self._shape: HeadShape = first.backend.shape
        self._scale, self._eps = first.scale, first.eps
        self._gelu, self._unit_offset = layers[0].mlp.gelu, first.unit_offset
        described = [_describe(layer, group) for layer, group in zip(layers, group_of, strict=True)]
        self._layers = (_Layer * len(layers))(*described)
        self._widths = [
            max(max(one.qkv.columns, one.gate_up.columns) for one in described),
            max(max(one.out.depth, one.down.depth) for one in described),
        ]

    def run(
        self, embedded: torch.Tensor, kv_caches: Sequence[torch.Tensor], steps: list[StepContext]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded: (T, hidden_size), overwritten; steps: one a KV group.

        Returns the last layer's output and the residual that it is not yet added to.
        """
        tokens, hidden = embedded.shape
        x, normed = torch.empty_like(embedded), torch.empty_like(embedded)
        wide, narrow = (embedded.new_empty(tokens, width) for width in self._widths)
        common = steps[0].common
        batch = _Batch(
            *(tokens, common.seq_lens.shape[0], hidden, self._gelu, self._unit_offset),
            *(
                torch.get_num_threads(),
                common.query_start_loc.data_ptr(),
                common.seq_lens.data_ptr(),
            ),
            *(self._eps, self._scale),
        )
        self._kernels.run_layers(
            x.data_ptr(),
            embedded.data_ptr(),
            (_P * 3)(normed.data_ptr(), wide.data_ptr(), narrow.data_ptr()),
            self._layers,
            len(self._layers),
            (_P * len(kv_caches))(*[cache.data_ptr() for cache in kv_caches]),
            (_Step * len(steps))(*[_step(step) for step in steps]),
            self._shape,
            batch,
        )
        return x, embedded


def make_native_stack(
    layers: Sequence[DecoderLayer], group_of: Sequence[int]
) -> NativeStack | None:
    """For finalized layers: their stack, or None if our kernels do not cover all of them."""
    kernels: CpuKernels | None = None
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(attention.backend, NativeAttention) or isinstance(mlp, MixtureOfExperts):
            return None
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if not isinstance(linear.kernel, AmxLinear):
                return None
            kernels = linear.kernel.kernels
    return None if kernels is None else NativeStack(layers, group_of, kernels)


def _describe(layer: DecoderLayer, group: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention.backend, NativeAttention)
    norms = (
        *(layer.input_layernorm, layer.attention_out_norm),
        *(layer.post_attention_layernorm, layer.mlp_out_norm, attention.q_norm, attention.k_norm),
    )
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return _Layer(
        *[_weight(norm) for norm in norms],
        *[_linear(linear) for linear in linears],
        attention.backend.window,
        group,
    )


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _linear(linear: Any) -> _Linear:
    assert isinstance(linear, Linear)
    kernel = linear.kernel
    assert isinstance(kernel, AmxLinear)
    bias = None if kernel.bias is None else kernel.bias.data_ptr()
    return _Linear(kernel.packed.data_ptr(), bias, *kernel.packed.shape)


def _step(step: StepContext) -> _Step:
    cos, sin = step.rotary_tables
    tables = step.common.block_tables
    pointers = (part.data_ptr() for part in (cos, sin, step.common.slot_mapping, tables))
    return _Step(*pointers, tables.stride(0))
