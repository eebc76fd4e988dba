"""Mixture of experts: a router picks a few of many MLPs for each token and adds up their answers.

A token's result does not depend on who else is routed where: every product is row-invariant, and the
answers are added in the order of the token's own scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.config.engine import LinearBackend
from octavo.config.moe import MoEConfig
from octavo.kernels.triton.experts import (
    combine,
    order_pairs,
    reference_combine,
    reference_route,
    route,
)
from octavo.kernels.triton.grouped_linear import grouped_linear
from octavo.kernels.triton.linear import TILES
from octavo.layers.activation import silu_and_mul
from octavo.layers.linear import Linear, cpu_linear

_ROW_MULTIPLE = 8
"""Outputs of the router are padded to it: the GPU's products have no other sizes."""


class MixtureOfExperts(nn.Module):
    """The MLP of a sparse layer. `shared`: the expert that every token uses, if there is one."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.config = config
        count, inner = config.num_experts, config.intermediate_size
        # The shared expert's own gate is one more row of the router.
        self.gate = Linear(hidden_size, (count, 1) if shared else (count,), dtype, device)
        # All experts stacked along the rows: gate and up of the first, then of the second, ...
        gate_up = torch.empty(count * 2 * inner, hidden_size, dtype=dtype, device=device)
        down = torch.empty(count * hidden_size, inner, dtype=dtype, device=device)
        self.gate_up: nn.Parameter | None = nn.Parameter(gate_up, requires_grad=False)
        self.down: nn.Parameter | None = nn.Parameter(down, requires_grad=False)
        self.shared_expert = shared
        self._experts: TiledExperts | GroupedExperts | None = None

    def finalize(self, backend: LinearBackend) -> None:
        """Make the loaded weights of router and experts ready; call before the linears' own."""
        assert self.gate_up is not None
        assert self.down is not None
        assert self.gate.weight is not None
        padded = F.pad(self.gate.weight.data, (0, 0, 0, -len(self.gate.weight) % _ROW_MULTIPLE))
        self.gate.weight = nn.Parameter(padded, requires_grad=False)
        count, inner = self.config.num_experts, self.config.intermediate_size
        kind = TiledExperts if backend == "tiled" else GroupedExperts
        self._experts = kind(
            self.config,
            self.gate_up.data.view(count, 2 * inner, -1),
            self.down.data.view(count, -1, inner),
        )
        self.gate_up = self.down = None

    def forward(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        """x: (T, hidden_size) -> the same shape. Rows whose slot is negative are padding."""
        assert self._experts is not None, "finalize() was not called"
        shared = None if self.shared_expert is None else self.shared_expert(x, slot_mapping)
        return self._experts(x, self.gate(x), slot_mapping, shared)


class TiledExperts:
    """CPU: one expert after another, each with the rows routed to it."""

    def __init__(self, config: MoEConfig, gate_up: Tensor, down: Tensor) -> None:
        """gate_up: (num_experts, 2 * intermediate_size, hidden_size); down: the other way round."""
        self._config = config
        self._linears = [
            (cpu_linear(one, None), cpu_linear(other, None))
            for one, other in zip(gate_up, down, strict=True)
        ]

    def __call__(
        self, x: Tensor, scores: Tensor, slot_mapping: Tensor, shared: Tensor | None
    ) -> Tensor:
        """x, shared: (T, hidden_size); scores: (T, num_experts or more) -> (T, hidden_size).

        slot_mapping is there for GroupedExperts: the CPU has no padding rows.
        """
        config = self._config
        count, top_k = config.num_experts, config.experts_per_token
        routing = reference_route(scores, count, top_k, config.renormalise)
        experts = routing.experts.flatten()
        order = experts.argsort(stable=True)
        sizes = experts.bincount(minlength=count).tolist()
        answers = x.new_empty(len(experts), x.shape[1])
        for (gate_up, down), pairs in zip(self._linears, torch.split(order, sizes), strict=True):
            if len(pairs):
                answers[pairs] = down(silu_and_mul(gate_up(x[pairs // top_k])))
        return reference_combine(answers, routing, count, scores, shared)


class GroupedExperts:
    """GPU: the products of all experts in one launch, planned on the device."""

    def __init__(self, config: MoEConfig, gate_up: Tensor, down: Tensor) -> None:
        """gate_up: (num_experts, 2 * intermediate_size, hidden_size); down: the other way round.

        Compiles the product of every tile: which one a step takes, warm-up steps need not show.
        """
        self._config, self._gate_up, self._down = config, gate_up, down
        experts = torch.zeros(1, config.experts_per_token, dtype=torch.int32, device=down.device)
        order = order_pairs(experts, config.num_experts)
        x = gate_up.new_zeros(1, gate_up.shape[2])
        inner = down.new_zeros(len(order.pairs), down.shape[2])
        for tile in TILES:
            grouped_linear(x, gate_up, order, tile)
            grouped_linear(inner, down, order, tile)

    def __call__(
        self, x: Tensor, scores: Tensor, slot_mapping: Tensor, shared: Tensor | None
    ) -> Tensor:
        """As TiledExperts; slot_mapping: (T,), negative for a padding row, whose answers are 0."""
        config = self._config
        count, top_k = config.num_experts, config.experts_per_token
        routing = route(scores, slot_mapping, count, top_k, config.renormalise)
        order = order_pairs(routing.experts, count)
        inner = silu_and_mul(grouped_linear(x, self._gate_up, order))
        answers = grouped_linear(inner, self._down, order)
        return combine(answers, routing, count, scores, shared)
