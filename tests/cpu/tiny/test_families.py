"""The engine on families with windows, fused weights or experts: results do not depend on the batch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.config.model import ModelConfig
from octavo.models.registry import weight_map
from octavo.outputs import RequestOutput
from tests.cpu.tiny.conftest import TINY
from tests.cpu.tiny.helpers import params, run, tiny, tokens

PROMPTS = [[3, 4, 5], list(range(10, 200)), [7] * 33, list(range(100, 429))]
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 5,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [3.0] * 6},
    },
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}


def save(folder: Path, family: str) -> Path:
    """A checkpoint with weights large enough that attention decides."""
    content = {**TINY, "tie_word_embeddings": False, **FAMILIES[family]}
    (folder / "config.json").write_text(json.dumps(content))
    generator = torch.Generator().manual_seed(0)
    targets = weight_map(ModelConfig.from_hf(content, folder, "safetensors"))
    drawn = {name: torch.randn(one.shape, generator=generator) for name, one in targets.items()}
    save_file({name: 0.2 * tensor for name, tensor in drawn.items()}, folder / "model.safetensors")
    return folder


def result(output: RequestOutput) -> tuple[list[int], list[float]]:
    [completion] = output.outputs
    assert completion.logprobs is not None
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return completion.token_ids, [entry[token].logprob for entry, token in pairs]


def preempted(llm: LLM, settings: SamplingParams) -> list[tuple[list[int], list[float]]]:
    """Results of all prompts together, where every fifth step one of them gives up its blocks."""
    engine, state, done = llm.engine, llm.engine.core.scheduler.state, {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, settings)
    for step in itertools.count(1):
        if not engine.has_work():
            break
        done |= {int(one.request_id): result(one) for one in engine.step() if one.finished}
        if step % 5 == 0 and len(state.running):
            state.preempt(list(state.running)[step % len(state.running)])
    assert state.totals.preemptions > 3
    return [done[number] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_each_request_alone(family: str, dtype: str, tmp_path: Path) -> None:
    """Tokens and the bits of their scores: batched, chunked, warm, preempted, without overlap.

    Warm, the prefix cache may hold what a window hides.
    """
    folder, settings = save(tmp_path, family), params(max_tokens=24, logprobs=0)
    loaded = {"load_format": "safetensors", "dtype": dtype}
    with tiny(folder, **loaded) as llm:
        solo = [result(run(llm, [prompt], settings)[0]) for prompt in PROMPTS]
    for budget in (37, 501):
        with tiny(folder, max_num_batched_tokens=budget, **loaded) as llm:
            for _ in ("cold", "warm"):
                assert [result(one) for one in run(llm, PROMPTS, settings)] == solo
    for overlap in (False, True):
        with tiny(folder, async_scheduling=overlap, max_num_batched_tokens=64, **loaded) as llm:
            assert preempted(llm, settings) == solo
    assert len({token for tokens, _ in solo for token in tokens}) > 15


@pytest.mark.parametrize("family", ["dynamic", "mistral", "gemma3", "qwen3_moe"])
def test_what_is_not_finite_reaches_only_who_sees_it(family: str, tmp_path: Path) -> None:
    """Token 11 is NaN. Texts before it, in blocks that later requests hit, are not; nor is what comes
    of the request itself another with other chunks, as where a window has passed the token."""
    folder = save(tmp_path, family)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][11] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    head = [20 + 7 * i % 40 for i in range(40)]
    good, bad = [*head, 60, 61, 62], [*head, 11, *[50] * 180]
    settings, found = params(max_tokens=5), []
    for budget in (9, 64, 300):
        with tiny(folder, load_format="safetensors", max_num_batched_tokens=budget) as llm:
            alone = tokens(run(llm, [good], settings))
            assert llm.reset_prefix_cache()
            [failing] = run(llm, [bad], settings)
            [after] = run(llm, [good], settings)
            assert tokens([after]) == alone
            assert budget > 64 or after.num_cached_tokens > 0  # one step that fails offers no block
            found.append((failing.outputs[0].finish_reason, failing.outputs[0].token_ids))
    assert found == found[:1] * 3
    assert (found[0][0] == "error") == (family != "mistral")


def test_a_window_bounds_the_blocks_of_a_long_text(overlap: bool, tmp_path: Path) -> None:
    """400 tokens generated behind a window of 20: 3 blocks of 16 and what is in flight."""
    with tiny(
        save(tmp_path, "mistral"), load_format="safetensors", async_scheduling=overlap
    ) as llm:
        kv, held = llm.engine.core.scheduler.state.kv, []
        llm.engine.add_request("long", [3, 4, 5], params(max_tokens=400))
        while llm.engine.has_work():
            llm.engine.step()
            held.append(kv.pool.num_usable_blocks - kv.num_free_blocks)
    assert max(held) <= 3


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_prompt_scores_behind_windows_are_those_of_each_prompt_alone(
    family: str, tmp_path: Path
) -> None:
    """Cold, chunked, and warm; Gemma's first group has all blocks, so that a hit can be scored."""
    folder, loaded = save(tmp_path, family), {"load_format": "safetensors"}
    settings = params(max_tokens=2, prompt_logprobs=1)
    with tiny(folder, **loaded) as llm:
        solo = [run(llm, [prompt], settings)[0].prompt_logprobs for prompt in PROMPTS]
    with tiny(folder, max_num_batched_tokens=37, **loaded) as llm:
        for _ in ("cold", "warm"):
            assert [one.prompt_logprobs for one in run(llm, PROMPTS, settings)] == solo
        hits = llm.engine.core.stats().prefix_cache_hits
    assert hits == {"mistral": 0, "gemma3": sum((len(p) - 1) // 16 * 16 for p in PROMPTS)}[family]
