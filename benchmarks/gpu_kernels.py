"""Times the kernels of serving one by one on this GPU: attention, linears, the small ops, sampling.

    PYTHONPATH=src python3 benchmarks/gpu_kernels.py --out kernels.json [--only attention sampling]

Shapes are those of Qwen3-8B and Qwen3-0.6B. Microseconds a launch by CUDA-graph replay, medians, on
random data. Operand sets rotate so that weights, K/V and wide activations come from memory; a single
row of activations, and the logits that are sampled, are in the L2 as they are in a step. Nothing is
judged; tests/gpu has the tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from octavo.attention.base import CommonAttentionMetadata
from octavo.attention.triton_paged import TritonAttention
from octavo.bench.provenance import describe
from octavo.bench.timer import compare, rotation_count
from octavo.config.kv_cache import KVCacheSpec
from octavo.core.request import EngineRequest
from octavo.kernels.triton.activation import reference_silu_and_mul, silu_and_mul
from octavo.kernels.triton.embedding import embed
from octavo.kernels.triton.linear import LARGE, MEDIUM, SMALL, choose_tile, linear_by_tile
from octavo.kernels.triton.norm import reference_rms_norm, rms_norm
from octavo.kernels.triton.rope_cache import rope_and_cache
from octavo.sample.device_sampler import DeviceSampler
from octavo.sample.state import SamplingState
from octavo.sampling_params import SamplingParams

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
VOCAB = 151_936
MAX_SETS = 16  # even of the smallest weights 100 MB, more than the L2 holds
REPLAYS = 20

LINEARS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (24_576, 4096),
    "8B down": (4096, 12_288),
    "8B lm_head": (VOCAB, 4096),
    "0.6B qkv": (4096, 1024),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
}
"""(N, K)."""
TILES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}
ATTENDED = (
    (1, 1, 8192), (64, 1, 1024), (64, 1, 8192), (256, 1, 1024), (1, 4000, 4000), (16, 4000, 4000)
)  # fmt: skip
"""Requests, new tokens of each, tokens of each."""
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.95, temperature 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "greedy, logprobs 0": {"temperature": 0.0, "logprobs": 0},
    "logprobs 5": {"logprobs": 5},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}
Row = dict[str, Any]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal bf16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).to(BF16)


def measure(
    arms: Mapping[str, Callable[..., Any]], sets: Sequence[tuple[Any, ...]], launches: int = 10
) -> dict[str, Row]:
    """Median, least and most microseconds of each arm; launches take the operand sets in turn."""
    calls = {name: [lambda f=f, s=s: f(*s) for s in sets] for name, f in arms.items()}
    timings = compare(calls, launches=max(len(sets), launches), rounds=5)
    return {name: dataclasses.asdict(timing) for name, timing in timings.items()}


def linears() -> list[Row]:
    """Every tile of the `fixed` linear beside cuBLAS, and which tile serving takes."""
    rows: list[Row] = []
    for name, (n, k) in LINEARS.items():
        copies = min(rotation_count(2 * n * k), MAX_SETS)
        weights = [(random(n, k, seed=seed),) for seed in range(copies)]
        for num_rows in (1, 64, 2048):
            if num_rows == 2048 and n == VOCAB:
                continue  # logits are computed for the last token of each request
            x = random(num_rows, k)
            arms: dict[str, Callable[..., Any]] = {
                arm: lambda w, x=x, tile=tile: linear_by_tile(x, w, None, tile)
                for arm, tile in TILES.items()
                if num_rows <= 64 or tile is not SMALL
            }
            arms["cublas"] = lambda w, x=x: F.linear(x, w)
            chosen = choose_tile(num_rows, n)
            rows.append(
                {
                    "name": name,
                    "rows": num_rows,
                    "chosen": next(arm for arm, tile in TILES.items() if tile == chosen),
                    "us": measure(arms, weights),
                }
            )
    return rows


def small_ops() -> list[Row]:
    """The fused ops of a layer of 8B; torch's arm is the plain reference."""
    weight, norm, table = random(4096), random(HEAD_DIM), random(VOCAB, 4096)
    angles = torch.outer(
        torch.arange(4096, device=DEVICE).float(),
        torch.logspace(0, -5, HEAD_DIM // 2, device=DEVICE),
    )
    cos, sin = angles.cos(), angles.sin()
    cache = torch.zeros(256, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=BF16, device=DEVICE)
    places = torch.arange(2048, device=DEVICE)

    def rope(qkv: torch.Tensor) -> torch.Tensor:
        index = places[: qkv.shape[0]]
        return rope_and_cache(
            qkv, cos, sin, index, index, cache, HEADS, KV_HEADS, norm, norm, 1e-6
        )  # fmt: skip

    rows: list[Row] = []
    for num_rows in (1, 2048):
        hidden = [(random(num_rows, 4096), random(num_rows, 4096, seed=1)) for _ in range(5)]
        wide = [(random(num_rows, 24_576),) for _ in range(4)]
        qkv = [(random(num_rows, 6144),) for _ in range(8)]
        ids = [(torch.randint(0, VOCAB, (num_rows,), device=DEVICE),) for _ in range(8)]
        arms: dict[str, tuple[dict[str, Callable[..., Any]], Sequence[tuple[Any, ...]]]] = {
            "rms_norm": (
                {
                    "ours": lambda x, r: rms_norm(x, weight, 1e-6, r),
                    "torch": lambda x, r: reference_rms_norm(x, weight, 1e-6, r),
                },
                hidden,
            ),
            "silu_and_mul": ({"ours": silu_and_mul, "torch": reference_silu_and_mul}, wide),
            "rope_and_cache": ({"ours": rope}, qkv),
            "embed": ({"ours": lambda i: embed(i, table), "torch": lambda i: table[i]}, ids),
        }
        for name, (functions, sets) in arms.items():
            rows.append({"name": name, "rows": num_rows, "us": measure(functions, sets)})
    return rows


def attention() -> list[Row]:
    """A layer of 8B: time, K/V bytes read a second, FLOPs a second."""
    spec = KVCacheSpec(BLOCK_SIZE, KV_HEADS, HEAD_DIM, BF16.itemsize)
    backend = TritonAttention(HEADS, spec, 256, 8192, DEVICE)
    rows: list[Row] = []
    for batch, query_len, length in ATTENDED:
        blocks = -(-length // BLOCK_SIZE)
        num_bytes = batch * blocks * spec.block_bytes
        shape = backend.kv_cache_shape(batch * blocks, spec)
        caches = [
            (torch.empty(shape, dtype=BF16, device=DEVICE).normal_(),)
            for _ in range(rotation_count(num_bytes))
        ]
        unused = torch.zeros(batch * query_len, dtype=torch.int64, device=DEVICE)
        common = CommonAttentionMetadata(
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * query_len,
            seq_lens=torch.full((batch,), length, dtype=torch.int32, device=DEVICE),
            block_tables=torch.randperm(batch * blocks, device=DEVICE).int().view(batch, blocks),
            slot_mapping=unused,
            positions=unused,
        )
        query = random(batch * query_len, HEADS, HEAD_DIM)
        metadata = backend.build_metadata(common)

        def attend(cache: torch.Tensor, query: Any = query, metadata: Any = metadata) -> Any:
            return backend.attend(query, cache, metadata, HEAD_DIM**-0.5)

        launches = REPLAYS if query_len == 1 else 3
        timing = measure({"ours": attend}, caches, launches)["ours"]
        seconds = timing["median_us"] / 1e6
        pairs = query_len * length - query_len * (query_len - 1) / 2
        flops = 4 * HEADS * HEAD_DIM * pairs * batch
        read = batch * length * spec.block_bytes / BLOCK_SIZE
        rows.append(
            {
                "batch": batch,
                "query_len": query_len,
                "context": length,
                "us": {"ours": timing},
                "kv_gb_per_s": read / seconds / 1e9,
                "tflop_per_s": flops / seconds / 1e12,
            }
        )
    return rows


def sampling() -> list[Row]:
    """A launch of the sampler over equal requests: on the GPU, and on the host that queues it."""
    rows: list[Row] = []
    for name, params in SAMPLED.items():
        for num_rows in (1, 64, 256):
            launch = sampler_launch(num_rows, params)
            for _ in range(3):
                launch()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(REPLAYS):
                launch()
            host = (time.perf_counter() - start) / REPLAYS
            torch.cuda.synchronize()
            rows.append(
                {"name": name, "rows": num_rows, "gpu_us": replayed(launch), "host_us": host * 1e6}
            )
    return rows


def sampler_launch(num_rows: int, params: dict[str, Any]) -> Callable[[], Any]:
    """One launch, to be called again and again: it writes nothing back."""
    state = SamplingState(num_rows, VOCAB, DEVICE)
    for slot in range(num_rows):
        state.add(slot, EngineRequest("r", [1], SamplingParams(**params), seed=slot))
    sampler = DeviceSampler(num_rows, VOCAB, DEVICE)
    logits = random(num_rows, VOCAB) * 3
    slots = list(range(num_rows))
    index = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    history = torch.randint(0, VOCAB, (num_rows, 256), dtype=torch.int32, device=DEVICE)
    num_tokens, prompt_len = torch.full_like(index, 100), torch.full_like(index, 20)
    return lambda: sampler.launch(
        logits, slots, index, state, history, num_tokens, prompt_len, write_back=False
    )


def replayed(launch: Callable[[], Any]) -> float:
    """Microseconds on the GPU, the median of five times REPLAYS replays of one launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = launch()  # with pinned memory, which the graph writes to
    graph.replay()
    samples = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / REPLAYS)
    del kept
    return statistics.median(samples)


PARTS = {
    "attention": attention,
    "linears": linears,
    "small_ops": small_ops,
    "sampling": sampling,
}


def main() -> None:
    """One JSON document; a line a row is printed meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"provenance": describe()}
    gc.collect()
    gc.freeze()  # a capture collects garbage first; this leaves it little to walk over
    for part in args.only:
        result[part] = PARTS[part]()
        for row in result[part]:
            print(part, json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
