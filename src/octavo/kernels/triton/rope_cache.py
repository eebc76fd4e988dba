"""From qkv to attention's operands in one pass: QK-norm, rotation, and K/V into the paged cache.

Owns the layout of a cache write: (num_blocks, 2, num_kv_heads, block_size, head_dim), K then V.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch
from octavo.kernels.triton.norm import apply_weight


@triton.jit
def _head_norm(
    first, second, scale_1, scale_2, eps,
    HEAD_DIM: tl.constexpr, dtype: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """RMSNorm of each head, given as two fp32 halves; rounds where `rms_norm` rounds."""
    variance = tl.sum(first * first + second * second, 1) / HEAD_DIM
    inverse = tl.rsqrt(variance + eps)[:, None]
    first = apply_weight(first * inverse, scale_1, dtype, UNIT)
    second = apply_weight(second * inverse, scale_2, dtype, UNIT)
    return first.to(tl.float32), second.to(tl.float32)


# Positions and slots may start anywhere in a buffer; that must not be another compilation.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rope_and_cache(
    qkv, cos, sin, positions, slot_mapping, kv_cache, q_norm, k_norm, query, block_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of one token, counted through q, k and v; each head in two halves."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    # A padding row may hold any position; it is rotated as if at 0 and stays out of the cache.
    position = tl.where(slot >= 0, tl.load(positions + token).to(tl.int64), 0)

    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    column = half < HALF
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & column
    start = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM + half
    plain_1 = tl.load(start, mask=inside, other=0.0)
    plain_2 = tl.load(start + HALF, mask=inside, other=0.0)
    dtype: tl.constexpr = plain_1.dtype
    first, second = plain_1.to(tl.float32), plain_2.to(tl.float32)

    if NORM:
        q_1 = tl.load(q_norm + half, mask=column, other=0.0).to(tl.float32)
        q_2 = tl.load(q_norm + HALF + half, mask=column, other=0.0).to(tl.float32)
        k_1 = tl.load(k_norm + half, mask=column, other=0.0).to(tl.float32)
        k_2 = tl.load(k_norm + HALF + half, mask=column, other=0.0).to(tl.float32)
        scale_1, scale_2 = tl.where(is_query, q_1, k_1), tl.where(is_query, q_2, k_2)
        first, second = _head_norm(first, second, scale_1, scale_2, eps, HEAD_DIM, dtype, UNIT)

    c = tl.load(cos + position * HALF + half, mask=column, other=0.0)
    s = tl.load(sin + position * HALF + half, mask=column, other=0.0)
    rotated_1 = tl.fma(first, c, -(second * s)).to(dtype)
    rotated_2 = tl.fma(second, c, first * s).to(dtype)

    target = query + (token * NUM_HEADS + head) * HEAD_DIM + half
    tl.store(target, rotated_1, mask=is_query & column)
    tl.store(target + HALF, rotated_2, mask=is_query & column)

    # Rows that do not see a key give it weight zero, and zero times NaN is NaN. So what is not finite in
    # V is stored in K, which a mask hides from them, and still reaches every row that sees the key.
    value_head = tl.where(is_value, head, head + NUM_KV_HEADS)
    value = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + value_head * HEAD_DIM + half
    value_1 = tl.load(value, mask=inside & (head >= NUM_HEADS), other=0.0).to(tl.float32)
    value_2 = tl.load(value + HALF, mask=inside & (head >= NUM_HEADS), other=0.0).to(tl.float32)
    is_finite = (tl.abs(value_1) < float("inf")) & (tl.abs(value_2) < float("inf"))
    broken = (tl.min(is_finite.to(tl.int32), 1) == 0)[:, None]
    instead = tl.where(is_value, 0.0, float("nan")).to(dtype)
    stored_1 = tl.where(broken, instead, tl.where(is_value, plain_1, rotated_1))
    stored_2 = tl.where(broken, instead, tl.where(is_value, plain_2, rotated_2))

    # K of all heads lies before V of all heads: one index, as in qkv.
    place = (head - NUM_HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = kv_cache + (slot // BLOCK_SIZE) * block_stride + place * HEAD_DIM + half
    cached = inside & (head >= NUM_HEADS) & (slot >= 0)
    tl.store(target, stored_1, mask=cached)
    tl.store(target + HALF, stored_2, mask=cached)


@cache
def launch_options(
    heads: int, kv_heads: int, head_dim: int, block_size: int, norm: bool, unit: bool = False
) -> dict[str, int | bool]:
    """Constexprs and warps of a layer shape: a program takes 512 pairs, one 16-byte load a thread."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    layer = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    blocks = {"BLOCK_SIZE": block_size, "BLOCK_HEADS": max(512 // half, 1), "BLOCK_HALF": half}
    return {**layer, **blocks, "NORM": norm, "UNIT": unit, "num_warps": 2}


def rope_and_cache(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slot_mapping: Tensor,
    kv_cache: Tensor, num_heads: int, num_kv_heads: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 0.0, unit_offset: bool = False,
) -> Tensor:  # fmt: skip
    """Rotates q and k of T tokens, writes k and v to their slots, returns q (T, num_heads, head_dim).

    qkv: (T, (num_heads + 2 num_kv_heads) head_dim) contiguous; cos, sin: fp32 tables (max_positions,
    head_dim / 2); positions: (T,) int32 or int64, inside the tables; slot_mapping: (T,) int64, -1 for
    a row whose k and v go nowhere; kv_cache: (num_blocks, 2, num_kv_heads, block_size, head_dim),
    each block contiguous. q_norm, k_norm: (head_dim,) weights of an RMSNorm of each head before the
    rotation, both or neither; unit_offset as in `rms_norm`. Pairs are (i, i + head_dim / 2), in fp32,
    rounded once. Raises KernelError for operands laid out otherwise.
    """
    tokens = qkv.shape[0]
    _, _, _, block_size, head_dim = kv_cache.shape
    heads = num_heads + 2 * num_kv_heads
    if qkv.shape[1] != heads * head_dim or not qkv.is_contiguous():
        raise KernelError(f"qkv of shape {tuple(qkv.shape)} is not {heads} x {head_dim} contiguous")
    if kv_cache.shape[2] != num_kv_heads or kv_cache.stride()[1:] != (
        num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1
    ):  # fmt: skip
        raise KernelError(f"kv_cache {tuple(kv_cache.shape)}: a block is not one contiguous range")
    if (q_norm is None) != (k_norm is None):
        raise KernelError("q_norm and k_norm come together")
    query = qkv.new_empty(tokens, num_heads, head_dim)
    norm = q_norm is not None
    options = launch_options(num_heads, num_kv_heads, head_dim, block_size, norm, unit_offset)
    grid = (tokens, -(-heads // options["BLOCK_HEADS"]))
    launch(
        _rope_and_cache, grid, qkv, cos, sin, positions, slot_mapping, kv_cache, q_norm, k_norm, query,
        kv_cache.stride(0), eps, **options,
    )  # fmt: skip
    return query
