"""Mixture of experts as a config asks for it: how many, how they are chosen, and in which layers."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.fields import FieldReader
from octavo.errors import shown

# Above any real model; the GPU's router holds the scores of all experts in one program.
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN = 1024, 32
_MAX_ALL_EXPERTS = 2**16  # of all layers: each is some entries in the map of weights
MOE_ARCHITECTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The sparse layers of a decoder; all of them are alike."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    renormalise: bool
    """The weights of a token's experts add up to 1; otherwise they are their softmax over all."""
    shared_intermediate_size: int = 0
    """Of an expert that every token uses, scaled by a gate of its own; 0: there is none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with a plain MLP."""

    def num_parameters(self, hidden_size: int, active: bool) -> int:
        """Of one sparse layer's router and experts; `active`: those that one token meets."""
        routed = self.experts_per_token if active else self.num_experts
        inner = routed * self.intermediate_size + self.shared_intermediate_size
        gates = self.num_experts + (self.shared_intermediate_size > 0)
        return hidden_size * (3 * inner + gates)


def read_moe(read: FieldReader, architecture: str, num_layers: int) -> MoEConfig | None:
    """None for an architecture without experts. Raises ConfigError naming the bad key."""
    if architecture not in MOE_ARCHITECTURES:
        return None
    # transformers 5 writes Mixtral's key for Qwen3-MoE, too.
    key = "num_local_experts" if read.config.get("num_experts") is None else "num_experts"
    num_experts = read.count(key, limit=min(MAX_EXPERTS, _MAX_ALL_EXPERTS // num_layers))
    limit = min(num_experts, MAX_EXPERTS_PER_TOKEN)
    per_token = read.count("num_experts_per_tok", limit=limit)
    if architecture == "MixtralForCausalLM":
        return MoEConfig(num_experts, per_token, read.count("intermediate_size"), renormalise=True)
    shared = architecture == "Qwen2MoeForCausalLM"
    return MoEConfig(
        num_experts,
        per_token,
        read.count("moe_intermediate_size"),
        read.flag("norm_topk_prob"),
        read.count("shared_expert_intermediate_size") if shared else 0,
        _dense_layers(read, num_layers),
    )


def _dense_layers(read: FieldReader, num_layers: int) -> frozenset[int]:
    named = read.config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise read.error("mlp_only_layers", f"{shown(named)} is not a list of layers")
    step = read.count("decoder_sparse_step", default=1)
    dense = frozenset(i for i in range(num_layers) if (i + 1) % step)
    return dense | frozenset(named).intersection(range(num_layers))
