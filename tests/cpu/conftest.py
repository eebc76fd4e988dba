"""Shared by all CPU tests: the real model of the demo, and transformers' idea of it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

# Before torch: idle OpenMP threads that spin make tests ten times slower on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before any Triton kernel is defined: these tests run kernels in Triton's interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from octavo.weights.hub import DEMO_SHA256, find_demo_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; fails, and says what to install, if it is not there."""
    path = find_demo_model()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == DEMO_SHA256, f"{path} is not the file that the tests were written for"
    return path


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' LlamaForCausalLM with the dequantised weights, fp32, eager attention.

    transformers takes 25 s to dequantise: the first of the test processes does it for all.
    """
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / "reference"
        if not folder.exists():
            dequantized = transformers.GgufConfig(dequantize=True)
            file = {"gguf_file": smollm2_path.name, "quantization_config": dequantized}
            load(smollm2_path.parent, **file, **how).save_pretrained(shared / "part")
            (shared / "part").rename(folder)
    return load(folder, **how).eval()
