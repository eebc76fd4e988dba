"""Rows of the embedding table by token id, safe for any id."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from octavo.errors import KernelError
from octavo.kernels.triton.lang import tl, triton
from octavo.kernels.triton.launch import launch, row_options


# Ids may start anywhere in a buffer; that must not be another compilation.
@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed(ids, weight, out, VOCAB: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    # Ids of dropped or padded rows may be anything; reading elsewhere would fault the whole GPU.
    token = tl.minimum(tl.maximum(tl.load(ids + row).to(tl.int64), 0), VOCAB - 1)
    value = tl.load(weight + token * HIDDEN + column, mask=inside)
    tl.store(out + row * HIDDEN + column, value, mask=inside)


@cache
def launch_options(vocab: int, hidden: int) -> dict[str, int]:
    """Constexprs and warps for a (vocab, hidden) table."""
    return {"VOCAB": vocab, "HIDDEN": hidden, **row_options(hidden)}


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """ids: (T,) int32 or int64; weight: (vocab, hidden) -> (T, hidden), the rows of the ids.

    An id outside the table gets its nearest row: the first or the last. Raises KernelError for
    strided operands.
    """
    if not ids.is_contiguous() or not weight.is_contiguous():
        raise KernelError("embed needs contiguous ids and a contiguous table")
    vocab, hidden = weight.shape
    out = weight.new_empty(len(ids), hidden)
    options = launch_options(vocab, hidden)
    launch(_embed, (len(ids), -(-hidden // options["BLOCK"])), ids, weight, out, **options)
    return out
