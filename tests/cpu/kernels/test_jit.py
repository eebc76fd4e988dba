"""The compiler front end without a GPU: inlining, errors with their place, the resource report."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import KernelError
from octavo.kernels import jit

TINY = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] += 1.0f; }\n'


def test_compiles_to_ptx_and_machine_code_without_a_gpu() -> None:
    compiled = jit.compile_source(TINY)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert ".target sm_90a" in compiled.ptx
    assert compiled.resources["tiny"].registers > 0
    assert compiled.resources["tiny"].spill_stores == 0


def test_each_header_is_inlined_once_and_keeps_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("#pragma once\n#define A 1\n")
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n#define B A\n')
    source = '#include "a.cuh"\n#include "b.cuh"\nint x = B;\n'
    text = jit.inline_includes(source, "k.cu", tmp_path)
    assert text.count("#define A 1") == 1
    assert "#pragma once" not in text
    assert text.index('#line 3 "/octavo/k.cu"') < text.index("int x = B;")


def test_error_points_at_the_header_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.cuh").write_text("int fine;\nint broken = ;\n")
    with pytest.raises(KernelError, match=r"bad\.cuh\(2\)"):
        jit.compile_source(jit.inline_includes('#include "bad.cuh"\n', root=tmp_path))


def test_an_include_may_have_a_comment() -> None:
    source = '#include "common/types.cuh"  // bf16\n'
    assert "typedef" in jit.inline_includes(source) or "struct" in jit.inline_includes(source)
    assert "#include" not in jit.inline_includes(source)


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda_bf16.h>",
        '#include "no_such.cuh"',
        '#include "/etc/passwd"',
        '#include "../jit.py"',
        '#include "common/../../jit.py"',
    ],
)
def test_system_and_missing_headers_are_refused(line: str) -> None:
    with pytest.raises(KernelError, match=r"system header|cannot find"):
        jit.compile_source(line + "\n")


def test_wgmma_needs_the_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
    assert jit.compile_source(source).cubin
    monkeypatch.setattr(jit, "ARCH", "sm_90")
    with pytest.raises(KernelError, match="wgmma"):
        jit.compile_source(source)


def test_missing_compiler_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_bindings(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError("no module named cuda")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_bindings)
    with pytest.raises(KernelError, match="pip install -e"):
        jit.compile_source(TINY)


def test_resource_report_of_a_fixed_log() -> None:
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'one' for 'sm_90a'\n"
        "ptxas         .     16 bytes stack frame, 24 bytes spill stores, 48 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90a'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 9 registers, used 0 barriers\n"
    )
    found = jit.Compiled("", b"", "", log).resources
    assert found["one"] == jit.KernelResources(168, 24, 48, 16, 1024)
    assert found["two"] == jit.KernelResources(9, 0, 0, 0, 0)
