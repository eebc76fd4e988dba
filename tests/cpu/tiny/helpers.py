"""Engines on the tiny model, and what its tests ask of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput
from octavo.worker.model_runner import ModelRunner

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
PROMPTS = [[3, 4, 5], list(range(10, 60)), [7] * 33, list(range(100, 229))]


def params(**changes: Any) -> SamplingParams:
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**settings, **changes})


@contextmanager
def tiny(model: Path, **settings: Any) -> Iterator[LLM]:
    """An LLM that ends with nothing held."""
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 8}
    with LLM(str(model), **{**defaults, **settings}) as llm:
        yield llm
        llm.engine.drain()
        core = llm.engine.core
        core.scheduler.check_integrity()
        assert core.scheduler.is_idle_clean()
        assert len(runner_of(llm).slots._free) == core.config.scheduler.max_num_seqs


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine.core._executor._worker._runner
    assert runner is not None
    return runner


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run(llm: LLM, prompts: list[list[int]], *settings: SamplingParams) -> list[RequestOutput]:
    return llm.generate(
        prompts, settings[0] if len(settings) == 1 else list(settings), use_tqdm=False
    )
