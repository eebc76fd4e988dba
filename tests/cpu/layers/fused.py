"""What the fused GPU op of an attention layer must give, by the layers that a CPU runs one by one."""

from __future__ import annotations

import torch

from octavo.attention.reference import contain_values
from octavo.config.rope import RopeConfig
from octavo.kernels.triton.norm import reference_rms_norm
from octavo.layers.rotary import RotaryEmbedding


def rope_and_cache_by_layers(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> torch.Tensor:
    """See kernels.triton.rope_cache.rope_and_cache; it writes to kv_cache in place too."""
    block_size, head_dim = kv_cache.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = (
            reference_rms_norm(x, weight, eps, None, unit_offset)[0]
            for x, weight in ((query, q_norm), (key, k_norm))
        )
    real = slot_mapping >= 0
    place = torch.where(real, positions.long(), 0)
    tables = cos[place][:, None], sin[place][:, None]
    rotary = RotaryEmbedding(RopeConfig(1e4), head_dim, 1, torch.device("cpu"))
    slots = slot_mapping[real]
    block, offset = slots // block_size, slots % block_size
    key, value = contain_values(rotary(key, tables), value)
    kv_cache[block, 0, :, offset] = key[real]
    kv_cache[block, 1, :, offset] = value[real]
    rotated: torch.Tensor = rotary(query, tables)
    return rotated
