"""SmolLM2's real weights on the GPU against the fp32 CPU reference, teacher-forced, and as an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.paged import common_metadata, for_groups
from tests.cpu.real.helpers import TEXTS
from tests.gpu.engines import FAMILIES, engine, fingerprint, model_folder, sampling
from tests.gpu.model_file import demo_model_path

from octavo.attention.base import AttentionBackend
from octavo.attention.groups import make_backend
from octavo.attention.reference import ReferenceAttention
from octavo.attention.triton_paged import TritonAttention
from octavo.config.engine import EngineArgs
from octavo.config.model import ModelConfig
from octavo.engine.tokenizer import load_tokenizer
from octavo.models.decoder import TORCH_DTYPES, DecoderModel
from octavo.weights.checkpoint import load_model_config
from octavo.weights.loader import load_model

LENGTH = 64
BOUNDS = {"smollm2": 2.0, **dict.fromkeys(FAMILIES, 0.3)}
"""Logit error of bf16 on the GPU against fp32. On an H200 the small qwen and llama are 0.112 and 0.166
off; in bf16 on a CPU they are 0.100 and 0.161, mistral 0.181, phi3 0.154 and SmolLM2 1.28."""
SINK_BOUND = 4.0
"""The same at SmolLM2's attention sinks, the first token and lone spaces, whose activations are in the
thousands: 2.77 in bf16 on a CPU, 3.33 on an H200."""
MIN_JUDGED = 80
"""Arg-maxes that must be far enough apart to be compared; there are 83 to 200."""


def teacher_forced(config: ModelConfig, device: str, ids: list[list[int]]) -> torch.Tensor:
    """Logits (texts, LENGTH, vocab_size) fp32 of all texts in one step, on the CPU."""
    torch_device = torch.device(device)
    spec = config.kv_cache_spec(16)
    heads, groups = config.num_heads, config.layer_groups()

    def make(window: int | None) -> AttentionBackend:
        if device == "cpu":
            return ReferenceAttention(heads, spec, window)
        return TritonAttention(heads, spec, len(ids), LENGTH, torch_device, window)

    backend = make_backend([config.window(group[0]) for group in groups], make)
    linear = "tiled" if device == "cpu" else "fixed"
    model: DecoderModel = load_model(config, backend, torch_device, 0, linear)
    blocks = LENGTH // 16
    tables = [list(range(1 + blocks * i, 1 + blocks * (i + 1))) for i in range(len(ids))]
    common = common_metadata([LENGTH] * len(ids), [LENGTH] * len(ids), tables, 16)
    common = type(common)(
        *(getattr(common, name).to(torch_device) for name in type(common).__slots__)
    )
    common = for_groups(common, len(groups))
    dtype = TORCH_DTYPES[config.dtype]
    shape = backend.kv_cache_shape(1 + blocks * len(ids), spec)
    caches = [
        torch.zeros(shape, dtype=dtype, device=torch_device) for _ in range(config.num_layers)
    ]
    with torch.inference_mode():
        tokens = torch.tensor(ids, device=torch_device).flatten()
        hidden = model.forward(tokens, common, caches, backend.build_metadata(common))
        logits = model.compute_logits(hidden).float().cpu()
    return logits.view(len(ids), LENGTH, -1)


@pytest.mark.parametrize("name", list(BOUNDS))
def test_argmax_equals_the_fp32_reference(name: str, tmp_path: Path) -> None:
    """Wherever the reference's first two are further apart than twice the bound."""
    model = model_folder(tmp_path, name) if name in FAMILIES else demo_model_path()
    if name == "smollm2":
        tokenizer = load_tokenizer(model)
        text = " ".join(TEXTS)
        ids = [tokenizer.encode(f"{one} {text}")[:LENGTH] for one in TEXTS]
    else:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, 4096, (16, LENGTH), generator=generator).tolist()
    args = EngineArgs(str(model))
    config = load_model_config(args)
    reference = teacher_forced(config_with(config, "float32"), "cpu", ids)
    ours = teacher_forced(config_with(config, "bfloat16"), "cuda", ids)
    assert reference.isfinite().all()
    assert ours.isfinite().all()
    error = (ours - reference).abs().amax(-1)
    top = reference.topk(2, dim=-1).values
    gap = top[..., 0] - top[..., 1]
    flips = ours.argmax(-1) != reference.argmax(-1)
    bound = torch.full_like(error, BOUNDS[name])
    if name == "smollm2":
        spaces = torch.tensor(ids) == tokenizer.encode(" ")[-1]
        spaces[:, 0] = True
        bound[spaces] = SINK_BOUND
    assert (error <= bound).all(), (error - bound).max().item()
    judged = gap > 2 * bound
    assert int(judged.sum()) >= MIN_JUDGED
    assert not (flips & judged).any(), gap[flips & judged].tolist()


def config_with(config: ModelConfig, dtype: Any) -> ModelConfig:
    return dataclasses.replace(config, dtype=dtype)


def test_real_model_repeats_itself_in_any_batch() -> None:
    """Solo, batched, chunked, warm, with graphs and without: the same tokens and score bits."""
    path = demo_model_path()
    prompts = [*TEXTS, " ".join(TEXTS)]
    params = [sampling(index, 48) for index in range(len(prompts))]
    settings = {"skip_tokenizer_init": False, "max_model_len": 1024}
    with engine(path, enforce_eager=True, async_scheduling=False, **settings) as llm:
        solo = [
            fingerprint(llm.generate(prompt, one, use_tqdm=False)[0])
            for prompt, one in zip(prompts, params, strict=True)
        ]
    for changes in ({}, {"long_prefill_token_threshold": 37}, {"enforce_eager": True}):
        with engine(path, **settings, **changes) as llm:
            for _ in ("cold", "warm"):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [fingerprint(output) for output in outputs] == solo
