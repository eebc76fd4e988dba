"""Runs one small engine over every kernel of serving; what compute-sanitizer watches.

Arguments: a shape of engines.py, `eager` or `graphs`, a folder for the model. With `bad-read` as the
only argument: one read outside an allocation, to see that it is noticed.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

import torch
from tests.gpu.engines import engine, model_folder, token_prompts

from octavo import SamplingParams
from octavo.kernels.triton.lang import tl, triton

MAX_TOKENS = 6
PROMPT_TOKENS = 70
"""Of the first request; beside it others are prefilled in chunks of what the budget leaves."""


@triton.jit
def _copy(source, target, offset):
    tl.store(target, tl.load(source + offset))


def read_outside() -> None:
    """4 KiB behind a tensor of 16 bytes."""
    source = torch.zeros(4, dtype=torch.int32, device="cuda")
    _copy[(1,)](source, torch.empty_like(source), 1024)
    torch.cuda.synchronize()


def requests() -> list[SamplingParams]:
    """Each way of sampling once."""
    common: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False}
    return [
        SamplingParams(temperature=0.0, logprobs=3, **common),
        SamplingParams(seed=1, top_p=0.9, top_k=20, min_p=0.01, logprobs=0, **common),
        SamplingParams(
            seed=2,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            prompt_logprobs=1,
            **common,
        ),
        SamplingParams(
            seed=3,
            logit_bias={5: 3.0},
            allowed_token_ids=list(range(1, 200)),
            min_tokens=2,
            stop_token_ids=[7],
            logprobs=1,
            **{**common, "ignore_eos": False},
        ),
    ]


def generate(shape: str, eager: bool, folder: Path) -> None:
    """One batch of mixed prefill and decode, and two blocks of a prefix found again."""
    settings: dict[str, Any] = {
        "linear_backend": "fixed",
        "enforce_eager": eager,
        "max_num_seqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": PROMPT_TOKENS + 10,
        "num_gpu_blocks_override": 64,
    }
    prompts = token_prompts([PROMPT_TOKENS, 40, 17, 3], seed=1)
    with engine(model_folder(folder, shape), **settings) as llm:
        outputs = llm.generate(prompts, requests(), use_tqdm=False)
        outputs += llm.generate(prompts[1], requests()[0], use_tqdm=False)
    for output in outputs:
        [completion] = output.outputs
        assert completion.error is None, completion.error
        assert 0 < len(completion.token_ids) <= MAX_TOKENS


def main() -> None:
    faulthandler.dump_traceback_later(300, exit=True)  # it takes 25: a hang says where it stands
    if sys.argv[1:] == ["bad-read"]:
        read_outside()
    else:
        shape, mode, folder = sys.argv[1:]
        generate(shape, mode == "eager", Path(folder))
    print("finished", flush=True)


if __name__ == "__main__":
    main()
