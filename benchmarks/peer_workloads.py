"""Runs the workloads that all engines are measured on through Octavo, on one GPU.

    python benchmarks/peer_workloads.py MODEL --workloads ../shared/peers/workloads.py --out result.json

The same request lists and settings as ../shared/peers/bench_vllm.py: dummy weights, bf16, prefix
caching off, no detokenising, fresh token ids each run, median of the runs. Prints one line a workload.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.provenance import describe


def load(path: Path) -> ModuleType:
    """The file with MODELS, workloads() and prompts()."""
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    llm: LLM, work: ModuleType, vocab_size: int, name: str, seed: int, temperature: float
) -> float:
    """Seconds from submitting all requests of a workload to the last token."""
    lengths_in, lengths_out = work.workloads()[name]
    prompts = [{"prompt_token_ids": ids} for ids in work.prompts(lengths_in, vocab_size, seed)]
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False)
        for n in lengths_out
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths_out
    return seconds


def main() -> None:
    """One JSON document, and a line a workload on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, comma separated")
    parser.add_argument("--linear-backend", default="cublas")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = load(args.workloads)
    content = work.MODELS[args.model]
    folder = Path(tempfile.mkdtemp()) / args.model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    start = time.perf_counter()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cuda",
        "skip_tokenizer_init": True,
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "linear_backend": args.linear_backend,
    }
    with LLM(str(folder), **settings) as llm:
        ready = time.perf_counter() - start
        print(f"START_S {ready:.1f}", flush=True)
        result: dict[str, Any] = {"model": args.model, "start_s": ready, "settings": settings}
        for name in (
            one for one in work.workloads() if not args.only or one in args.only.split(",")
        ):
            lengths_in, lengths_out = work.workloads()[name]
            # The first seed warms allocator and clocks, and is not counted.
            times = [
                run(llm, work, content["vocab_size"], name, seed, args.temperature)
                for seed in range(args.runs + 1)
            ][1:]
            seconds = statistics.median(times)
            result[name] = {
                "seconds": times,
                "out_tok_s": sum(lengths_out) / seconds,
                "total_tok_s": (sum(lengths_in) + sum(lengths_out)) / seconds,
            }
            print(
                f"RESULT octavo {args.model} {args.linear_backend} {name} s={seconds:.3f} "
                f"out_tok_s={result[name]['out_tok_s']:.0f} "
                f"total_tok_s={result[name]['total_tok_s']:.0f}",
                flush=True,
            )
    if args.out:
        result["provenance"] = describe()
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
