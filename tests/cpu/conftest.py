"""Shared by all CPU tests: the real model of the demo, and transformers' idea of it."""

from __future__ import annotations

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


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: a file's tests in one process; and, since it takes 25 s to load, those
    of all files that use the reference."""
    users = {
        item.path for item in items if "smollm2_reference" in getattr(item, "fixturenames", ())
    }
    for item in items:
        group = "reference" if item.path in users else "/".join(item.path.parts[-2:])
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; fails, and says what to install, if it is not there."""
    path = find_demo_model()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == DEMO_SHA256, f"{path} is not the file that the tests were written for"
    return path


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:
    """transformers' LlamaForCausalLM with the dequantised weights, fp32, eager attention."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent,
        gguf_file=smollm2_path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
