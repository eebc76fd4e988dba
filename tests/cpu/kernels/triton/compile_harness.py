"""Compiles Triton kernels for sm_90 on a machine without a GPU and says what came out.

The tests themselves run with TRITON_INTERPRET=1, where a kernel is not compilable, so all cases of a
call go to one fresh process. Use, with the constexprs that the launcher takes (one function for both):

    CASES = [
        Case.of_launch(
            norm._rms_norm,
            {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
            norm.launch_options(4096, add=True),  # constexprs, num_warps, num_stages
            label="norm of 4096",
        ),
    ]

    @functools.cache
    def compiled() -> dict[str, CompiledKernel]:
        return compile_cases(CASES)

    def test_nothing_spills() -> None:
        for label, kernel in compiled().items():
            assert kernel.spill_bytes == 0, label

Types are Triton's ("*bf16", "*i64", "i32", "fp32", ...). Pointers count as 16-byte aligned, as torch's
allocations are; "i32:16" is an integer that is always a multiple of 16. Constexprs may be anything that
pickles. A kernel that does not compile raises AssertionError with its label and the compiler's message.

This folder has no __init__.py: with one, pytest would import it as `triton`, in place of the real one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that one CTA may have on Hopper."""

_FEATURES = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma.sync": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]",
    "tma": r"\bcp\.async\.bulk\.tensor",
    "ld.128": r"\bld\.global[.\w:]*\.v4\.b32|\bld\.global[.\w:]*\.v2\.b64",
    "st.128": r"\bst\.global[.\w:]*\.v4\.b32|\bst\.global[.\w:]*\.v2\.b64",
    "fma": r"\bfma\.rn\.f32",
}


@dataclass(frozen=True)
class Case:
    """One kernel with one set of compile-time values. `signature`: run-time arguments only."""

    module: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    label: str = ""

    @classmethod
    def of_launch(
        cls, kernel: Any, signature: Mapping[str, str], options: Mapping[str, Any], label: str
    ) -> Case:
        """A case from the keyword arguments that a launcher gives to `kernel[grid](...)`."""
        constexprs = dict(options)
        warps, stages = constexprs.pop("num_warps", 4), constexprs.pop("num_stages", 3)
        function = kernel.fn
        return cls(
            function.__module__, function.__name__, signature, constexprs, warps, stages, label
        )

    @property
    def name(self) -> str:
        """The key of this case in the results."""
        return self.label or self.kernel


@dataclass(frozen=True)
class CompiledKernel:
    """What ptxas and cuobjdump say: registers and spilled bytes a thread, shared bytes a CTA.

    `features` is a subset of wgmma, mma.sync, cp.async, tma, ld.128, st.128 and fma.
    """

    ptx: str
    features: frozenset[str]
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int


def compile_cases(cases: Sequence[Case]) -> dict[str, CompiledKernel]:
    """Compiles all cases in one process without TRITON_INTERPRET; results by `Case.name`."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"labels are not unique: {names}"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "cases"), Path(folder, "result")
        given.write_bytes(pickle.dumps(list(cases)))
        script = f"from {_NAME} import _serve; import sys; _serve(*sys.argv[1:])"
        command = [sys.executable, "-c", script, str(given), str(result)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr[-8000:]
        found: dict[str, CompiledKernel] = pickle.loads(result.read_bytes())
    return found


_NAME = "tests.cpu.kernels.triton.compile_harness"


def _serve(given: str, result: str) -> None:
    """The child process: reads the cases, writes the results."""
    done: dict[str, CompiledKernel] = {}
    for case in pickle.loads(Path(given).read_bytes()):
        try:
            done[case.name] = _compile(case)
        except Exception as error:
            traceback.print_exc()
            raise SystemExit(f"{case.name} does not compile: {error}") from error
    Path(result).write_bytes(pickle.dumps(done))


def _compile(case: Case) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    given = {*case.signature, *case.constexprs}
    missing = [name for name in kernel.arg_names if name not in given]
    unknown = given - set(kernel.arg_names)
    assert not missing, f"arguments without a type or value: {missing}"
    assert not unknown, f"the kernel has no arguments {unknown}"
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in case.constexprs:
            signature[name] = "constexpr"
            continue
        kind, _, multiple = case.signature[name].partition(":")
        signature[name] = kind
        if kind.startswith("*") or multiple == "16":
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attributes
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    usage = _resource_usage(binary.asm["cubin"])
    ptx = binary.asm["ptx"]
    return CompiledKernel(
        ptx=ptx,
        features=frozenset(name for name, how in _FEATURES.items() if re.search(how, ptx)),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=binary.metadata.shared,
        num_warps=binary.metadata.num_warps,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, ... of the only kernel in a cubin, through Triton's own cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
