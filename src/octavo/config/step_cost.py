"""What one step must do, as numbers: bytes and FLOPs of each operation, and the least time they take.

Pure. Bytes are those that have to move if every tensor is read and written once: weights, the K/V of
the keys that are attended to, inputs and results. Index arrays are left out (some bytes a token).
FLOPs are those of matrix products, as in `ModelConfig.flops_per_token`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Machine:
    """What a GPU can do at most, and where the figures come from."""

    name: str
    bytes_per_s: float
    """Reading from memory."""
    flops_per_s: float
    """Dense 16-bit matrix products."""
    ramp_s: float
    """What a kernel takes besides, until memory is busy and from then on until it has drained."""
    source: str


H200 = Machine(
    "H200", bytes_per_s=4.636e12, flops_per_s=849e12, ramp_s=4.5e-6,
    source="measured, benchmarks/results/device-h200.json: reading, and 849 TFLOP/s on zeros (with "
    "random data the power limit leaves 694); ramp: cuBLAS at one row, beyond bytes / 4.3 TB/s",
)  # fmt: skip


def machine_for(device_name: str) -> Machine:
    """Figures for a device by its full name. Any but an H200 gets an H200's; `source` says so."""
    if device_name.startswith("NVIDIA H200"):
        return H200
    return replace(H200, source=f"assumed, not those of {device_name!r}: {H200.source}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of work in a step. Bytes and FLOPs are totals over its `count` calls."""

    name: str
    count: int
    """Calls a step."""
    other_bytes: int
    """Inputs and results."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    """Read from the KV cache."""
    flops: int = 0

    @property
    def bytes(self) -> int:
        """All that is read and written."""
        return self.weight_bytes + self.kv_bytes + self.other_bytes

    def ceiling_s(self, machine: Machine) -> float:
        """Least seconds for all calls, traffic and arithmetic overlapping fully.

        Where everything fits into the L2 a kernel can be faster.
        """
        return max(self.bytes / machine.bytes_per_s, self.flops / machine.flops_per_s)

    def expected_s(self, machine: Machine) -> float:
        """The ceiling plus a ramp for each call."""
        return self.ceiling_s(machine) + self.count * machine.ramp_s


def causal_pairs(query_len: int, seq_len: int, window: int | None = None) -> int:
    """(query, key) pairs of the last `query_len` of `seq_len` tokens, each seeing all up to itself,
    or as many of these as the window holds."""
    pairs = query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
    if window is not None:  # what the tokens at positions from `window` on see no more
        hidden = max(0, seq_len - window)
        first = max(0, hidden - query_len)
        pairs -= (hidden * (hidden + 1) - first * (first + 1)) // 2
    return pairs


def _product(
    name: str, layers: int, size: int, rows: int, n: int, k: int, bias: bool = False,
    inputs: int | None = None, copies: float = 1.0,
) -> Operation:  # fmt: skip
    """One (rows, k) by (n, k) a layer. inputs: rows that are read, if fewer; copies: of the weight."""
    moved = (rows if inputs is None else inputs) * k + rows * n
    weights, flops = round(layers * copies * (n * k + bias * n)), layers * 2 * rows * n * k
    return Operation(name, layers, layers * moved * size, weights * size, flops=flops)


def _mlp_operations(model: ModelConfig, tokens: int) -> list[Operation]:
    """Of plain layers and of sparse ones, where tokens meet as many experts as if by chance."""
    moe, hidden, size = model.moe, model.hidden_size, model.dtype_bytes

    def mlp(
        prefix: str, layers: int, inner: int, rows: int, bias: bool = False, copies: float = 1.0
    ) -> list[Operation]:
        gate_up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        return [
            _product(gate_up, layers, size, rows, 2 * inner, hidden, bias, tokens, copies),
            Operation(f"{prefix}silu_and_mul", layers, layers * 3 * rows * inner * size),
            _product(down, layers, size, rows, hidden, inner, bias, copies=copies),
        ]

    dense = model.num_layers if moe is None else len(moe.dense_layers)
    sparse = model.num_layers - dense
    operations = mlp("", dense, model.intermediate_size, tokens, model.mlp_bias) if dense else []
    if moe is None or not sparse:
        return operations
    shared = moe.shared_intermediate_size
    if shared:
        operations += mlp("shared_", sparse, shared, tokens)
    pairs = tokens * moe.experts_per_token
    met = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)
    gates = moe.num_experts + (shared > 0)
    return [
        *operations,
        _product("router", sparse, size, tokens, gates, hidden),
        *mlp("experts_", sparse, moe.intermediate_size, pairs, copies=met),
        Operation("combine", sparse, sparse * (pairs + tokens) * hidden * size),
    ]


def step_operations(
    model: ModelConfig, requests: Sequence[tuple[int, int]], num_sampled: int
) -> list[Operation]:
    """The operations of a step in order of their first call.

    requests: (query_len, seq_len) each, seq_len after the step; num_sampled: rows that get logits and
    a token. Raises ValueError for lengths that no request can have.
    """
    if any(not 1 <= query_len <= seq_len for query_len, seq_len in requests):
        raise ValueError(f"query_len and seq_len do not fit in {requests}")
    size, layers, head_dim = model.dtype_bytes, model.num_layers, model.head_dim
    hidden = model.hidden_size
    query, kv = model.num_heads * head_dim, model.num_kv_heads * head_dim
    qkv, row = query + 2 * kv, hidden * size
    tokens = sum(query_len for query_len, _ in requests)
    keys = pairs = 0
    for window, count in Counter(map(model.window, range(layers))).items():
        seen = (min(seq, window + length - 1) if window else seq for length, seq in requests)
        keys += count * sum(seen)
        pairs += count * sum(causal_pairs(*request, window) for request in requests)

    def norm(name: str, count: int, rows: int) -> Operation:
        return Operation(name, count, rows * tokens * row, count * row)

    # qkv is read and written; cos and sin are head_dim / 2 fp32 each.
    rotated = tokens * (2 * qkv * size + 4 * head_dim)
    cached, attended = keys * 2 * kv * size, 4 * query * pairs
    operations = [
        Operation("embed", 1, 2 * tokens * row),
        # x and the residual in, both out; but the first norm has no residual yet.
        norm("input_norm", layers, 4 * layers - 2),
        _product("qkv_proj", layers, size, tokens, qkv, hidden, model.attention_bias),
        Operation("rope_and_cache", layers, layers * rotated, layers * model.qk_norm * 2 * head_dim * size),
        Operation("attention", layers, layers * 2 * tokens * query * size, 0, cached, attended),
        _product("o_proj", layers, size, tokens, hidden, query, model.attention_out_bias),
        norm("post_attention_norm", layers, 4 * layers),
        *_mlp_operations(model, tokens),
        *([norm("post_norms", 2 * layers, 4 * layers)] if model.post_norms else []),
        norm("final_norm", 1, 4),
    ]  # fmt: skip
    if num_sampled:
        picked, logits = num_sampled * row, num_sampled * model.vocab_size * size
        table, flops = model.vocab_size * row, 2 * num_sampled * model.vocab_size * hidden
        operations.append(Operation("gather_rows", 1, 2 * picked))
        operations.append(Operation("lm_head", 1, picked + logits, table, 0, flops))
        operations.append(Operation("sample", 1, logits))
    return operations
