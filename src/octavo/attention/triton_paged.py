"""The attention backend of Hopper GPUs: memory, plan and launch of kernels/triton/paged_attention.py.

On CPU tensors it runs in Triton's interpreter, for tests.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention.base import CommonAttentionMetadata
from octavo.config.kv_cache import KVCacheSpec
from octavo.errors import ConfigError
from octavo.kernels.triton.attention_plan import (
    SMALL_ROWS,
    SMALL_TILES,
    SPLIT_SIZE,
    AttentionShape,
    empty_plan,
    plan_attention,
    plan_capacity,
)
from octavo.kernels.triton.paged_attention import Step, Workspace, paged_attention, programs_per_sm

WORKSPACE_BYTES = 128 << 20
"""At most, for partial results of splits that run apart; requests beyond it run their splits in turn."""
_INTERPRETED_SMS = 2


class TritonAttention:
    """AttentionBackend for bf16 and fp16. One instance serves all layers and steps of one stream."""

    def __init__(
        self, num_heads: int, spec: KVCacheSpec, max_num_seqs: int, max_model_len: int,
        device: torch.device, sliding_window: int | None = None,
    ) -> None:  # fmt: skip
        """Allocates what all launches share: nothing later, nothing for a number of blocks.

        Raises ConfigError for a shape that the kernels do not have.
        """
        self.shape = AttentionShape(
            num_kv_heads=spec.num_kv_heads,
            group=num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_size,
            window=sliding_window or 0,
            capacity=plan_capacity(max_num_seqs),
        )
        _check_shape(self.shape, num_heads)
        splits = -(-max_model_len // SPLIT_SIZE)
        most = max_num_seqs * splits * SMALL_ROWS * SMALL_TILES * spec.num_kv_heads
        self._rows = min(most, WORKSPACE_BYTES // (4 * (spec.head_dim + 2)))
        self._workspace = Workspace.allocate(self.shape, self._rows, device)
        self._plan = empty_plan(self.shape, device)
        self._num_sms = _INTERPRETED_SMS
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def kv_cache_shape(self, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """(num_blocks, K or V, num_kv_heads, block_size, head_dim)."""
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)

    def build_metadata(self, common: CommonAttentionMetadata) -> Step:
        """Plan the step, on the device; valid until the next call."""
        plan_attention(
            common.query_start_loc,
            common.seq_lens,
            self._plan,
            self._num_sms * programs_per_sm(self.shape, large=False),
            self._rows,
            self.shape,
        )
        most_rows = len(common.slot_mapping) * self.shape.group  # of one request, by its tokens
        return Step(
            common.query_start_loc,
            common.seq_lens,
            common.block_tables,
            self._plan,
            only_small=most_rows <= SMALL_ROWS * SMALL_TILES,
        )

    def with_tables(self, metadata: Step, common: CommonAttentionMetadata) -> Step:
        """The same plan for other block tables."""
        return replace(metadata, block_tables=common.block_tables)

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: Step, scale: float) -> Tensor:
        """See AttentionBackend; the bits of a token's result depend on its request only."""
        return paged_attention(
            query, kv_cache, metadata, self._workspace, scale, self.shape, self._num_sms
        )


def _check_shape(shape: AttentionShape, num_heads: int) -> None:
    if num_heads != shape.num_kv_heads * shape.group or not 1 <= shape.group <= SMALL_ROWS:
        raise ConfigError(f"{num_heads} heads over {shape.num_kv_heads} kv heads are not supported")
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= 256:
        raise ConfigError(f"head_dim {shape.head_dim} is not a multiple of 16 up to 256")
    if shape.block_size & (shape.block_size - 1) or not 16 <= shape.block_size <= 256:
        raise ConfigError(f"block_size {shape.block_size} is not a power of two from 16 to 256")
