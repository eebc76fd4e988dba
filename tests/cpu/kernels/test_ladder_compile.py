"""What every rung's machine code must and must not contain; checked without a GPU."""

from __future__ import annotations

import functools

import pytest

from octavo.inspect.sass import SassKernel, disassemble
from octavo.kernels import jit
from octavo.kernels.jit import Compiled
from octavo.kernels.matmul.registry import HEADER_FIELDS, RUNGS, Rung

BF16 = [rung for rung in RUNGS if rung.dtype == "bf16"]
FP32 = [rung for rung in RUNGS if rung.dtype == "fp32" and rung.kind == "matmul"]
REGISTER_LIMIT = {0: 32, 1: 40, 2: 40, 3: 40, 4: 64, 5: 128, 6: 128, 7: 128, 8: 128, 9: 72}
WGMMA_WIDTH = {9: 64, 10: 128, 11: 128}  # 256 from rung 12 on


@functools.cache
def compiled(rung: Rung) -> Compiled:
    return jit.compile_source(rung.source, name=rung.path.name)


@functools.cache
def sass(rung: Rung) -> SassKernel:
    return disassemble(compiled(rung).cubin)[rung.entry]


def named(rung: Rung) -> str:
    return rung.name


def from_rung(first: int) -> pytest.MarkDecorator:
    chosen = [rung for rung in BF16 if rung.number >= first]
    assert chosen
    return pytest.mark.parametrize("rung", chosen, ids=named)


def test_the_ladder_is_complete() -> None:
    assert [rung.number for rung in RUNGS] == list(range(len(RUNGS)))
    assert len(RUNGS) >= 20


@pytest.mark.parametrize("rung", RUNGS, ids=named)
def test_header_tells_the_whole_story(rung: Rung) -> None:
    assert set(rung.header) == set(HEADER_FIELDS)
    assert all(len(text) > 9 for name, text in rung.header.items() if name != "PTX")
    assert "not yet" not in rung.header["Measured"]


@pytest.mark.parametrize("rung", RUNGS, ids=named)
def test_no_spills_no_stack_no_serialised_wgmma(rung: Rung) -> None:
    result = compiled(rung)
    for code in jit.SERIALIZED_WGMMA:
        assert code not in result.log
    for resources in result.resources.values():
        assert resources.spill_stores == resources.spill_loads == resources.stack == 0
        assert resources.registers <= REGISTER_LIMIT.get(rung.number, 168)
    kernel = sass(rung)
    assert kernel.instructions
    assert not kernel.count("LDL")
    assert not kernel.count("STL")


@pytest.mark.parametrize("rung", RUNGS, ids=named)
def test_a_cta_fits_an_sm(rung: Rung) -> None:
    static = compiled(rung).resources[rung.entry].static_smem
    assert rung.dynamic_smem + static <= 227 * 1024
    assert compiled(rung).resources[rung.entry].registers * rung.threads <= 65_536
    assert rung.threads % 32 == 0


@pytest.mark.parametrize("rung", BF16, ids=named)
def test_wgmma_has_the_intended_shape(rung: Rung) -> None:
    width = WGMMA_WIDTH.get(rung.number, 256)
    opcodes = sass(rung).opcodes()
    shapes = {name for name in opcodes if name.startswith("HGMMA")}
    assert shapes == {f"HGMMA.64x{width}x16.F32.BF16"}
    # Each unrolled K block has four k16 steps.
    assert sum(opcodes[name] for name in shapes) % 4 == 0
    assert not sass(rung).count("HMMA")


@pytest.mark.parametrize("rung", FP32, ids=named)
def test_fp32_rungs_use_no_tensor_cores(rung: Rung) -> None:
    kernel = sass(rung)
    assert kernel.count("FFMA") > 0
    assert not kernel.count("HGMMA")
    assert not kernel.count("HMMA")


def test_vectorised_rungs_load_16_bytes() -> None:
    by_number = {rung.number: sass(rung) for rung in FP32}
    assert not by_number[4].count("LDG.E.128")
    for number in (6, 7, 8):
        assert by_number[number].count("LDG.E.128") > 0
        assert by_number[number].count("LDS.128") > 0
    # Outer products: 64 FMAs for 4 wide shared loads in each k step.
    assert by_number[8].count("FFMA") == 16 * by_number[8].count("LDS.128")


def test_ilp_pair_is_not_folded_away() -> None:
    rung = RUNGS[0]
    kernels = disassemble(compiled(rung).cubin)
    assert set(kernels) == {"ilp_dependent", "ilp_independent"}
    for kernel in kernels.values():
        assert kernel.count("FFMA") >= rung.constants["FMAS"]


@from_rung(9)
def test_tensor_maps_feed_the_tiles(rung: Rung) -> None:
    assert sass(rung).count("UTMALDG") >= 2


@from_rung(12)
def test_registers_move_from_producer_to_consumers(rung: Rung) -> None:
    moves = [step for step in sass(rung).instructions if step.root == "USETMAXREG"]
    held = {step.opcode.split(".")[1]: int(step.names[-1], 0) for step in moves}
    assert (len(moves), set(held)) == (2, {"DEALLOC", "TRY_ALLOC"})
    # More than the launch gave out would be waited for without end.
    launched = compiled(rung).resources[rung.entry].registers * rung.threads
    consumers = rung.threads // 128 - 1
    assert (held["DEALLOC"] + consumers * held["TRY_ALLOC"]) * 128 <= launched


@from_rung(15)
def test_multicast_without_a_fence_over_the_whole_gpu(rung: Rung) -> None:
    """mbarrier.arrive.release.cluster compiled to MEMBAR.ALL.GPU in the main loop: 714 to 515 TFLOP/s.

    The two that stay are the releases of the cluster barriers at the start and the end.
    """
    opcodes = sass(rung).opcodes()
    assert any("UTMALDG" in name and "MULTICAST" in name for name in opcodes)
    assert opcodes["MEMBAR.ALL.GPU"] <= 2


@from_rung(17)
def test_tma_store_follows_a_proxy_fence(rung: Rung) -> None:
    """fast.cu's latent bug: staging written by st.shared, read by TMA, with no fence in between."""
    steps = sass(rung).instructions
    stores = [i for i, step in enumerate(steps) if step.root == "UTMASTG"]
    assert stores
    fences = [i for i, s in enumerate(steps) if s.opcode.startswith("FENCE.VIEW.ASYNC")]
    writes = [i for i, s in enumerate(steps) if s.root in ("STS", "STSM")]
    for store in stores:
        last_write = max(i for i in writes if i < store)
        assert any(last_write < fence < store for fence in fences)
        between = {step.root for step in steps[last_write:store]}
        assert "BAR" in between, "the writers meet before one thread stores"


@from_rung(19)
def test_stmatrix_replaces_plain_stores(rung: Rung) -> None:
    assert sass(rung).count("STSM") >= 16
    assert not sass(rung).count("STS")


def test_the_lean_loop_is_lean() -> None:
    """Instructions of the main loop, the one with four K blocks in a trip."""
    loops: dict[int, int] = {}
    for rung in RUNGS[19:]:
        steps = sass(rung).instructions
        for end, step in enumerate(steps):
            if step.root == "BRA" and step.target is not None and step.target < end:
                trip = [s.root for s in steps[step.target : end + 1]]
                if trip.count("HGMMA") == 16:
                    loops[rung.number] = min(loops.get(rung.number, len(trip)), len(trip))
    assert loops[19] > 240
    assert max(loops[20], loops[21]) < 230
    assert loops[22] < 170


def test_only_the_dependent_launch_rungs_ask_for_it() -> None:
    for rung in BF16:
        programmatic = bool(rung.constants.get("PROGRAMMATIC", 0))
        assert (sass(rung).count("ACQBULK") > 0) == programmatic
