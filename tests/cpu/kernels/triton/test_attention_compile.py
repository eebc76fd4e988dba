"""What the sm_90 machine code of the attention kernels must and must not contain; needs no GPU."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from tests.cpu.kernels.triton.compile_harness import (
    SHARED_LIMIT,
    Case,
    CompiledKernel,
    compile_cases,
)

from octavo.inspect.sass import disassemble
from octavo.kernels.jit import SERIALIZED_WGMMA
from octavo.kernels.triton import attention_plan, paged_attention
from octavo.kernels.triton.attention_plan import AttentionShape
from octavo.kernels.triton.paged_attention import launch_options, programs_per_sm

# Head sizes x dtypes; among them the groups, blocks and windows that change the code.
SHAPES = {
    "64 bf16": AttentionShape(3, 3, 64, 16, 0, 256),
    "64 fp16": AttentionShape(8, 1, 64, 256, 0, 256),
    "96 bf16": AttentionShape(32, 1, 96, 16, 0, 256),
    "96 fp16": AttentionShape(4, 8, 96, 32, 0, 16),
    "128 bf16": AttentionShape(8, 4, 128, 16, 0, 256),
    "128 fp16": AttentionShape(4, 7, 128, 16, 0, 1024),
    "128 window bf16": AttentionShape(2, 16, 128, 16, 4096, 256),
    "256 bf16": AttentionShape(8, 2, 256, 64, 0, 256),
    "256 fp16": AttentionShape(1, 5, 256, 16, 0, 256),
}
SMALL, LARGE = paged_attention.attend_small, paged_attention.attend_large
SPILL_LIMIT = 96
"""Bytes of a large tile that wait for the next item outside the loop over keys."""


def signature(dtype: str, large: bool) -> dict[str, str]:
    values = dict.fromkeys(("query", "out", "cache"), f"*{dtype}")
    lists = ("tables", "query_start_loc", "seq_lens", "plan", "tickets")
    strides = ("query_stride", "table_stride", "block_stride")
    shared = values | dict.fromkeys(lists, "*i32") | dict.fromkeys(strides, "i32:16")
    shared["scale"] = "fp32"
    if large:
        return shared
    partial = {"partial_out": "*fp32", "partial_state": "*fp32", "arrivals": "*i32"}
    return shared | partial | {"num_tokens": "i32"}


def case(name: str, large: bool) -> Case:
    options = launch_options(SHAPES[name], large)
    kernel: Any = LARGE if large else SMALL
    label = f"{name} {'large' if large else 'small'}"
    return Case.of_launch(kernel, signature(name.split()[-1], large), options, label)


@functools.cache
def compiled() -> dict[str, CompiledKernel]:
    plan = Case.of_launch(
        attention_plan._plan,
        {
            **dict.fromkeys(("query_start_loc", "seq_lens", "plan"), "*i32"),
            **dict.fromkeys(("num_requests", "num_programs", "workspace_rows"), "i32"),
        },
        {"SHAPE": SHAPES["128 fp16"]},
        "plan",
    )
    return compile_cases([plan, *(case(name, large) for name in SHAPES for large in (False, True))])


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", SHAPES)
def test_fits_the_chip_and_reads_tiles_asynchronously(name: str, large: bool) -> None:
    kernel = compiled()[case(name, large).name]
    programs = programs_per_sm(SHAPES[name], large)
    assert kernel.spill_bytes <= (SPILL_LIMIT if large else 0)
    assert kernel.registers * kernel.num_warps * 32 * programs <= 65_536
    assert (kernel.shared_bytes + 1024) * programs <= SHARED_LIMIT + 1024
    assert ("wgmma" in kernel.features) == large
    # The total of the weights is a product of 8 columns, which no wgmma of Triton's is.
    assert {"mma.sync", "cp.async"} <= kernel.features
    assert kernel.ptx.count("ex2.approx.ftz.f32") > 0
    assert "ex2.approx.f32" not in kernel.ptx


@pytest.mark.parametrize("name", SHAPES)
def test_the_loop_over_keys_of_a_large_tile_neither_spills_nor_waits(
    name: str, tmp_path: Path
) -> None:
    kernel = compiled()[case(name, True).name]
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(kernel.ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [ptxas, "--gpu-name=sm_90a", "-v", ptx, "-o", cubin]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert not any(code in done.stderr for code in SERIALIZED_WGMMA)
    steps = disassemble(cubin.read_bytes())["attend_large"].instructions
    opcodes = [step.opcode.split(".")[0] for step in steps]
    products = [at for at, opcode in enumerate(opcodes) if opcode == "HGMMA"]
    assert products
    assert not {"LDL", "STL"} & set(opcodes[products[0] : products[-1]])


def test_the_plan_is_one_small_program() -> None:
    assert compiled()["plan"].spill_bytes == 0
