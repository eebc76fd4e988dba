"""The host side of the ladder without a GPU: layouts, grids, and errors that come before a launch."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.bench import device, ladder
from octavo.errors import KernelError
from octavo.kernels import driver, jit, ops
from octavo.kernels.launch import Kernel, LaunchShape, pack
from octavo.kernels.matmul import host
from octavo.kernels.matmul.host import GemmArgs
from octavo.kernels.matmul.registry import RUNGS, parse_constants, rung

BF16 = torch.bfloat16
NAMES = {"map_a": "a", "map_b": "b", "map_c": "c"}


def offset_of(member: str) -> str:
    """What offsetof expands to in this compiler's own headers; NVRTC knows no __builtin_offsetof."""
    return f"__INTADDR__(&(((GemmArgs*)0)->{member}))"


def test_argument_struct_is_the_device_struct() -> None:
    """Offsets and size of the ctypes mirror, checked by the CUDA compiler itself."""

    def checks(shift: int) -> str:
        lines = [f'static_assert(sizeof(GemmArgs) == {ctypes.sizeof(GemmArgs)}, "size");']
        for name in (field[0] for field in GemmArgs._fields_):
            if name != "pad":
                offset = getattr(GemmArgs, name).offset + shift
                where = offset_of(NAMES.get(name, name))
                lines.append(f'static_assert({where} == {offset}, "{name}");')
        return '#include "common/types.cuh"\n' + "\n".join(lines) + "\n"

    jit.compile_source(checks(0))
    with pytest.raises(KernelError, match="ldc"):
        jit.compile_source(checks(8))


def test_argument_struct_is_aligned_for_tensor_maps() -> None:
    kept = [GemmArgs.aligned() for _ in range(50)]
    assert all(ctypes.addressof(args) % 128 == 0 for args in kept)


def test_launch_structures_have_the_layout_of_cuda_h() -> None:
    """Against cuda-bindings, which are generated from the header."""
    from cuda.bindings import driver as bindings

    theirs = bindings.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 3, 5, 7
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 384, 2, 4
    theirs.sharedMemBytes = 230_400
    theirs.hStream = bindings.CUstream(0x1234_5678_9ABC)
    attribute = bindings.CUlaunchAttribute()
    attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = 2
    attribute.value.clusterDim.y = 1
    attribute.value.clusterDim.z = 1
    attributes, count = driver.launch_attributes(2, programmatic=False)
    assert count == 1
    size = ctypes.sizeof(driver.LaunchAttribute)
    assert bytes(attributes)[:size] == ctypes.string_at(attribute.getPtr(), size)
    ours = driver.LaunchConfig(3, 5, 7, 384, 2, 4, 230_400, 0x1234_5678_9ABC, attributes, 1)
    head = driver.LaunchConfig.attributes.offset
    assert bytes(ours)[:28] == ctypes.string_at(theirs.getPtr(), 28)
    assert bytes(ours)[32:head] == ctypes.string_at(theirs.getPtr() + 32, head - 32)


def test_programmatic_attribute_follows_the_cluster() -> None:
    from cuda.bindings import driver as bindings

    attributes, count = driver.launch_attributes(4, programmatic=True)
    kinds = bindings.CUlaunchAttributeID
    assert count == 2
    assert attributes[0].id == int(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    assert attributes[1].id == int(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    assert attributes[1].value.flag == 1
    assert driver.launch_attributes(1, programmatic=False)[1] == 0


@pytest.mark.parametrize(
    ("number", "m", "n", "resident", "grid"),
    [
        (2, 33, 100, 132, (4, 2, 1)),
        (9, 130, 65, 132, (2, 3, 1)),
        (13, 128, 256, 132, (1, 1, 1)),
        (13, 4096, 4096, 132, (128, 1, 1)),  # 512 tiles: 4 rounds, with 128 CTAs as with 132
        (13, 8192, 8448, 132, (132, 1, 1)),  # 64 x 33 tiles: 16 full rounds
        (15, 1, 8, 132, (2, 1, 1)),
        (15, 4096, 4096, 132, (128, 1, 1)),
        (15, 8192, 8192, 116, (114, 1, 1)),  # 1024 pairs on 58 clusters: 18 rounds of 57
    ],
)
def test_grid(number: int, m: int, n: int, resident: int, grid: tuple[int, int, int]) -> None:
    assert host.grid_of(rung(number), m, n, resident) == grid


def test_grid_refuses_more_tile_rows_than_a_launch_has() -> None:
    with pytest.raises(KernelError, match="tile rows"):
        host.grid_of(rung(2), 65_536 * 32, 32, 132)


def test_persistent_grids_need_no_more_rounds_than_the_whole_chip() -> None:
    persistent = rung(13)
    for tiles in range(1, 2000):
        ctas = host.grid_of(persistent, tiles * persistent.block_m, 8, 132)[0]
        assert 1 <= ctas <= 132
        assert -(-tiles // ctas) == -(-tiles // 132)


@pytest.mark.parametrize(
    ("a", "b", "out", "dtype", "message"),
    [
        ((64, 64), (64, 72), (64, 64), BF16, "K differs"),
        ((64, 64), (64, 64), (64, 72), BF16, r"out is \(64, 72\)"),
        ((64, 60), (64, 60), (64, 64), BF16, "K=60"),
        ((64, 0), (64, 0), (64, 64), BF16, "K=0"),
        ((2, 64, 64), (64, 64), (64, 64), BF16, "a has 3 dimensions"),
        ((64, 64), (64, 64), (64, 64), torch.float16, "a is torch.float16"),
    ],
)
def test_operands_that_do_not_fit_are_named(
    a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in (a, b, out)]
        with pytest.raises(KernelError, match=message):
            host.check_operands(rung(12), *tensors)


def test_cpu_tensors_are_refused_and_fake_ones_are_not_run() -> None:
    x = torch.zeros(8, 8, dtype=BF16)
    with pytest.raises(KernelError, match="CUDA"):
        ops.matmul(12, x, x, x)
    with FakeTensorMode():
        fake = torch.empty(8, 8, dtype=BF16, device="cuda")
        ops.matmul("12_two_consumers", fake, fake, fake)


def test_extents_that_32_bits_cannot_round_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: K blocks or tiles would be counted below zero, and nothing be written."""
    with FakeTensorMode():
        for m, n, k in ((host.MAX_EXTENT, 8, 8), (8, host.MAX_EXTENT, 8), (8, 8, host.MAX_EXTENT)):
            shapes = (m, k), (n, k), (m, n)
            a, b, out = (torch.empty(shape, dtype=BF16, device="cuda") for shape in shapes)
            with pytest.raises(KernelError, match="extent"):
                host.check_operands(rung(20), a, b, out)


def test_calls_are_kept_and_dropped_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_calls", {})
    monkeypatch.setattr(host, "check_operands", lambda *_: None)
    launched: list[int] = []
    kernel = SimpleNamespace(launch=lambda *_: launched.append(1))
    monkeypatch.setattr(
        host, "prepare", lambda *_: SimpleNamespace(kernel=kernel, shape=0, parameters=0)
    )
    operands = [torch.empty(8, 8 + i, dtype=BF16) for i in range(400)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(host.run, 12, x, x, x) for x in operands * 4]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    assert len(launched) == 1600
    assert 0 < len(host._calls) <= host._MAX_KEPT_CALLS + 8


def test_unknown_rungs_are_errors() -> None:
    with pytest.raises(KernelError, match="no rung"):
        rung("99_magic")
    with pytest.raises(KernelError, match="no matmul rung"):
        host._rung(0)


def test_no_driver_is_an_error_each_time_and_never_a_hang() -> None:
    """cuda.core's second get_kernel without libcuda deadlocks; our probe must fail both times."""
    program = (
        "from octavo.kernels import driver\n"
        "from octavo.errors import KernelError\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        driver.load_library(b'x')\n"
        "        print('loaded')\n"
        "    except KernelError as error:\n"
        "        print('refused')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.split() == ["refused"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_a_kernel_error() -> None:
    with pytest.raises(KernelError, match="no CUDA GPU"):
        host.kernel_of(rung(9)).load(0)


def test_constants_are_read_as_the_compiler_reads_them() -> None:
    source = "constexpr int A = 7;\nconstexpr int B = A / 2 * (A + 1) - 3;\n"
    assert parse_constants(source) == {"A": 7, "B": 21}
    jit.compile_source(source + 'static_assert(B == 21, "B");\n')
    for each in RUNGS:
        lines = [x for x in each.source.splitlines() if x.startswith("constexpr int")]
        lines += [f'static_assert({k} == {v}, "{k}");' for k, v in each.constants.items()]
        jit.compile_source("\n".join(lines) + "\n", name=each.path.name)


class RecordingDriver:
    """Stands in for libcuda: remembers what a launch asked for."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], int, list[tuple[int, int, int]]]] = []
        self.contexts: list[int | None] = []

    def cuLaunchKernelEx(
        self, config: object, function: object, parameters: object, extra: None
    ) -> int:
        c = ctypes.cast(config, ctypes.POINTER(driver.LaunchConfig)).contents
        attributes = [
            (a.id, a.value.cluster.x, a.value.flag) for a in c.attributes[: c.attribute_count]
        ]
        shape = (c.grid_x, c.grid_y, c.grid_z, c.block_x, c.shared_bytes)
        assert self.contexts == [7]
        self.launches.append((shape, c.stream, attributes))
        return 0

    def cuDeviceGet(self, handle: object, device: object) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, handle: object) -> int:
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p)).contents.value = 7
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: object) -> int:
        self.contexts.pop()
        return 0


def test_a_launch_carries_shape_cluster_and_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RecordingDriver()
    monkeypatch.setattr(driver, "_libcuda", lambda: recorder)
    monkeypatch.setattr(driver, "primary_context", driver.primary_context.__wrapped__)  # uncached
    kernel = Kernel("", "entry", _functions={0: ctypes.c_void_p(1)})
    shape = LaunchShape((128, 1, 1), 384, dynamic_smem=230_400, cluster=2, programmatic=True)
    for stream in (0xABC0, 0xDEF0, 0xABC0):
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device, s=stream: SimpleNamespace(cuda_stream=s)
        )
        kernel.launch(0, shape, pack(ctypes.c_int(1)))
    assert [stream for _, stream, _ in recorder.launches] == [0xABC0, 0xDEF0, 0xABC0]
    assert recorder.contexts == []
    for what, _, attributes in recorder.launches:
        assert what == (128, 1, 1, 384, 230_400)
        assert [a[0] for a in attributes] == [4, 6]
        assert attributes[0][1] == 2
        assert attributes[1][2] == 1


def test_packed_parameters_point_at_their_values() -> None:
    packed = pack(ctypes.c_int(7), ctypes.c_float(0.5))
    assert ctypes.cast(packed[0], ctypes.POINTER(ctypes.c_int)).contents.value == 7
    assert ctypes.cast(packed[1], ctypes.POINTER(ctypes.c_float)).contents.value == 0.5


def test_driver_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def cuLaunchKernelEx(self, *arguments: object) -> int:
            return 1

        def cuGetErrorName(self, status: int, name: object) -> int:
            ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"
            return 0

    monkeypatch.setattr(driver, "_libcuda", lambda: Failing())
    with pytest.raises(KernelError, match=r"cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.call("cuLaunchKernelEx", None, None, None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_benchmarks_without_a_gpu_say_so() -> None:
    with pytest.raises(KernelError, match="CUDA GPU"):
        ladder.run_ladder((4096,))
    with pytest.raises(KernelError, match="CUDA GPU"):
        device.measure_device()
