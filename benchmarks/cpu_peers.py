"""Octavo and its peers on this CPU, one after the other: SmolLM2-135M, 128 tokens in, 128 out, greedy.

    python benchmarks/cpu_peers.py --out result.json octavo=.venv/bin/python transformers=.venv/bin/python \
        openvino=ov/bin/python vllm=vl/bin/python

Each ENGINE=PYTHON runs in a process of its own with that interpreter. Output tokens a second count the
time from submitting all prompts to the last token, prefill included; the best of the rounds counts, for
all engines alike. Weights: the demo's GGUF (Q4_1); bf16 in all but OpenVINO, which keeps Q4_1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH = 128
Generate = Callable[[list[list[int]]], int]
"""Prompts of token ids -> tokens generated."""


def octavo(folder: Path) -> Generate:
    from octavo import LLM, SamplingParams

    llm = LLM(
        str(folder / "model.gguf"), dtype="bfloat16", max_model_len=512, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> int:
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return generate


def transformers(folder: Path) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]]) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=LENGTH,
                max_new_tokens=LENGTH,
                pad_token_id=0,
            )
        return int(done.numel() - ids.numel())

    return generate


def vllm(folder: Path) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder / "hf"),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> int:
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    return generate


def openvino(folder: Path) -> Generate:
    import openvino_genai as ov

    scheduler = ov.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 32
    pipe = ov.LLMPipeline(str(folder / "model.gguf"), "CPU", scheduler_config=scheduler)
    config = ov.GenerationConfig(max_new_tokens=LENGTH, ignore_eos=True, do_sample=False)
    texts = json.loads((folder / "texts.json").read_text())

    def generate(prompts: list[list[int]]) -> int:
        chosen = [texts[json.dumps(ids)] for ids in prompts]
        result = pipe.generate(chosen, config)
        return int(result.perf_metrics.get_num_generated_tokens())

    return generate


ENGINES = {"octavo": octavo, "transformers": transformers, "openvino": openvino, "vllm": vllm}


def measure(engine: str, folder: Path, sizes: list[int], rounds: int) -> dict[str, Any]:
    """In the engine's own process: start-up, tokens a second, peak memory."""
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text())
    start = time.perf_counter()
    generate = ENGINES[engine](folder)
    ready = time.perf_counter() - start
    generate(prompts[-1:])
    first = time.perf_counter() - start
    rates = {}
    for size in sizes:
        seconds = []
        for index in range(rounds):
            batch = [prompts[(index * 7 + row) % len(prompts)] for row in range(size)]
            begin = time.perf_counter()
            tokens = generate(batch)
            seconds.append(time.perf_counter() - begin)
            assert tokens == size * LENGTH, f"{tokens} tokens of {size} x {LENGTH}"
        rates[str(size)] = round(size * LENGTH / min(seconds), 1)
    # Not getrusage: ru_maxrss may be of the process that started us.
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    return {
        "tokens_per_s": rates,
        "ready_s": round(ready, 2),
        "first_answer_s": round(first, 2),
        "peak_mib": round(peak),
    }


def prepare(folder: Path) -> None:
    """Model files and prompts of exactly LENGTH tokens, as ids and as text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from octavo.weights.hub import find_demo_model

    source = Path(find_demo_model())
    (folder / "model.gguf").symlink_to(source)
    options = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **options)
    model.hf_quantizer = None  # dequantised as it was loaded, but remembers
    del model.config.quantization_config
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    text = (Path(__file__).parents[1] / "docs" / "log.md").read_text("utf-8")
    ids = tokenizer(text)["input_ids"]
    prompts, texts = [], {}
    for start in range(0, len(ids) - LENGTH, 97):
        piece = ids[start : start + LENGTH]
        written = tokenizer.decode(piece)
        if tokenizer(written)["input_ids"] == piece:
            prompts.append(piece)
            texts[json.dumps(piece)] = written
    assert len(prompts) >= 32, f"only {len(prompts)} prompts survive being written as text"
    (folder / "prompts.json").write_text(json.dumps(prompts[:64]))
    (folder / "texts.json").write_text(json.dumps(texts))


def main() -> None:
    """The table, and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="ENGINE=PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        engine, folder = args.inside
        found = measure(engine, Path(folder), args.sizes, args.rounds)
        print("RESULT " + json.dumps(found), flush=True)
        os._exit(0)  # some engines do not end by themselves
    from octavo.bench.provenance import describe

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for engine, python in (one.split("=", 1) for one in args.engines):
            command = [python, __file__, "--inside", engine, name, "--rounds", str(args.rounds)]
            command += ["--sizes", *map(str, args.sizes)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(f"{engine} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            results[engine] = json.loads(lines[0].removeprefix("RESULT "))
            print(engine, results[engine], flush=True)
    if args.out:
        document = {"environment": describe(), "length": LENGTH, "results": results}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
