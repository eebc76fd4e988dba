"""Mixtral, Qwen2-MoE and Qwen3-MoE: what the checkpoint calls the weights of a sparse layer's MLP."""

from __future__ import annotations

from octavo.config.model import ModelConfig
from octavo.models.decoder import WeightTarget

# The block, and gate, up and down of an expert.
_MIXTRAL = ("block_sparse_moe", "w1", "w3", "w2")
_QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")


def expert_map(config: ModelConfig, ours: str, theirs: str) -> dict[str, WeightTarget]:
    """Router and experts of the layer that is called `ours` here and `theirs` in the checkpoint.

    The reader of GGUF files gives all families Qwen's names.
    """
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    inner, shared = moe.intermediate_size, moe.shared_intermediate_size
    mixtral = config.architecture == "MixtralForCausalLM" and config.load_format != "gguf"
    block, gate, up, down = _MIXTRAL if mixtral else _QWEN
    places = {f"{block}.gate": ("gate.weight", 0, (moe.num_experts, hidden))}
    for index in range(moe.num_experts):
        expert = f"{block}.experts.{index}"
        places[f"{expert}.{gate}"] = ("gate_up", 2 * index * inner, (inner, hidden))
        places[f"{expert}.{up}"] = ("gate_up", (2 * index + 1) * inner, (inner, hidden))
        places[f"{expert}.{down}"] = ("down", index * hidden, (hidden, inner))
    if shared:
        places["mlp.shared_expert_gate"] = ("gate.weight", moe.num_experts, (1, hidden))
        linear = "shared_expert.gate_up_proj.weight"
        places["mlp.shared_expert.gate_proj"] = (linear, 0, (shared, hidden))
        places["mlp.shared_expert.up_proj"] = (linear, shared, (shared, hidden))
        linear = "shared_expert.down_proj.weight"
        places["mlp.shared_expert.down_proj"] = (linear, 0, (hidden, shared))
    return {
        f"{theirs}.{name}.weight": WeightTarget(f"{ours}.mlp.{parameter}", start, shape)
        for name, (parameter, start, shape) in places.items()
    }
