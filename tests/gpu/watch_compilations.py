"""Serves requests of all kinds in a process of its own and tells what Triton compiles meanwhile.

Arguments: a model's folder, `eager` or `graphs`. The last line printed is a JSON list of texts, one a
compilation after the engine was ready. Triton's hook is called for every kernel variant that is new
to the process, also if its cache on disk has it: loading one stops a step as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tests.gpu.engines import engine, token_prompts

from octavo import LLM, SamplingParams
from octavo.kernels.triton.lang import tl, triton

LENGTHS = (1, 3, 17, 300, 900)
COMMON: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "detokenize": False}
MIXES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p, top-k": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "min-p": {"temperature": 1.1, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, penalties": {"temperature": 0.0, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 0},
    "top logprobs": {"temperature": 0.8, "top_p": 0.9, "logprobs": 5},
}


@triton.jit
def _unknown(target):
    tl.store(target, 1)


def variant(info: dict[str, Any]) -> str:
    """A kernel's name and what its arguments are specialised for, from what Triton tells a hook."""
    details = info["compile"]
    constants = {path[0]: value for path, value in details["constants"].items()}
    aligned = {path[0] for path, attributes in details["configs"][0].items() if attributes}
    parts = []
    for place, (name, kind) in enumerate(details["signature"].items()):
        text = f"{name}={constants[place]}" if place in constants else f"{name}: {kind}"
        parts.append(text + " (/16)" * (place in aligned))
    return f"{info['fn'].name}({', '.join(parts)})"


def serve(llm: LLM, compiled: list[str]) -> list[str]:
    """Every length with every way of sampling, alone and together. Returns who compiled what."""
    found: list[str] = []

    def generate(label: str, lengths: list[int], params: list[SamplingParams]) -> None:
        prompts = token_prompts(lengths, seed=len(lengths))
        for output in llm.generate(prompts, params, use_tqdm=False):
            assert output.outputs[0].error is None, output.outputs[0].error
        found.extend(f"{label}: {text}" for text in compiled)
        compiled.clear()

    mixes = {name: SamplingParams(seed=1, **COMMON, **mix) for name, mix in MIXES.items()}
    for name, params in mixes.items():
        for length in LENGTHS:
            generate(f"{name}, {length} tokens", [length], [params])
    some = list(mixes.values())
    for count in (2, 8, 16, 33, 64):
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
        generate(f"{count} requests", lengths, [some[i % len(some)] for i in range(count)])
    return found


def main(model: Path, mode: str) -> None:
    """See above. Raises if the hook does not work."""
    compiled: list[str] = []
    with engine(model, enforce_eager=mode == "eager") as llm:
        triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(variant(info))
        found = serve(llm, compiled)
    compiled.clear()
    _unknown[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    assert len(compiled) == 1, f"a compilation was not noticed: {compiled}"
    assert compiled[0].startswith("_unknown(target: *i32"), compiled
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
