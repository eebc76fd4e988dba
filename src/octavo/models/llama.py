"""Llama, Mistral, Qwen, Phi-3 and Gemma 3 models: what the checkpoint calls each weight.

Their config says the rest.
"""

from __future__ import annotations

from octavo.config.model import ModelConfig
from octavo.models.decoder import WeightTarget
from octavo.models.moe import expert_map

_NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
# Gemma norms what is added to the residual stream, too; its names say where a norm stands.
_GEMMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


def weight_map(config: ModelConfig, fused: bool = False) -> dict[str, WeightTarget]:
    """Checkpoint tensor name -> its place in the model. Complete: nothing else is expected.

    fused: q, k and v are one tensor in the checkpoint, gate and up another, stacked as ours are.
    """
    hidden = config.hidden_size
    vocab = (config.vocab_size, hidden)
    targets = {
        "model.embed_tokens.weight": WeightTarget("embed_tokens.weight", 0, vocab),
        "model.norm.weight": WeightTarget("norm.weight", 0, (hidden,)),
    }
    if not config.tie_word_embeddings:
        targets["lm_head.weight"] = WeightTarget("lm_head.weight", 0, vocab)
    for index in range(config.num_layers):
        targets |= _layer_map(config, index, fused)
    return targets


def _layer_map(config: ModelConfig, index: int, fused: bool) -> dict[str, WeightTarget]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    # (our linear, its input size, its checkpoint parts in order, has a bias)
    linears = [
        (
            "self_attn.qkv_proj",
            hidden,
            {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
            config.attention_bias,
        ),
        ("self_attn.o_proj", query, {"self_attn.o_proj": hidden}, config.attention_out_bias),
    ]
    targets = {
        f"{theirs}.{name}.weight": WeightTarget(f"{ours}.{own}.weight", 0, (hidden,))
        for name, own in (_GEMMA_NORMS if config.post_norms else _NORMS).items()
    }
    if config.is_sparse(index):
        targets |= expert_map(config, ours, theirs)
    else:
        gate_up, bias = {"mlp.gate_proj": inner, "mlp.up_proj": inner}, config.mlp_bias
        linears.append(("mlp.gate_up_proj", hidden, gate_up, bias))
        linears.append(("mlp.down_proj", inner, {"mlp.down_proj": hidden}, bias))
    if config.qk_norm:
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            place = WeightTarget(f"{ours}.{name}.weight", 0, (config.head_dim,))
            targets[f"{theirs}.{name}.weight"] = place
    for name, in_features, parts, bias in linears:
        start = 0
        if fused:
            parts = {name: sum(parts.values())}
        for part, rows in parts.items():
            shape = (rows, in_features)
            targets[f"{theirs}.{part}.weight"] = WeightTarget(f"{ours}.{name}.weight", start, shape)
            if bias:
                targets[f"{theirs}.{part}.bias"] = WeightTarget(
                    f"{ours}.{name}.bias", start, (rows,)
                )
            start += rows
    return targets
