"""Remarks: on a listing made by hand, and on what NVRTC 13.0.88 really does to rungs of the ladder."""

from __future__ import annotations

import re
from functools import cache

import pytest

from octavo.errors import KernelError
from octavo.inspect.asm import Assembly, Note, assemble, from_listings
from octavo.inspect.asm_views import render_text, short_operands
from octavo.inspect.notes import access_bytes, most_in_flight, notes, tensor_clocks
from octavo.inspect.sass import parse_sass
from octavo.inspect.source_loops import source_loops, unrolling
from octavo.kernels.matmul.registry import rung
from tests.cpu.inspect.listings import LOOP_SASS, LOOP_SOURCE, PLAIN, listing


def texts(remarks: list[Note], kind: str) -> list[str]:
    return [n.text for n in remarks if n.kind == kind]


@cache
def built(name: str) -> tuple[Assembly, list[Note]]:
    found = rung(name)
    assembly = assemble(found.source, found.path.name, found.entry)
    return assembly, notes(assembly)


def test_a_loop_unrolled_by_four_with_a_tail() -> None:
    remarks = notes(listing(LOOP_SASS, LOOP_SOURCE))
    (unrolled,) = [n for n in remarks if n.kind == "Unrolling"]
    assert "(line 1) is unrolled x4 in SASS. One trip of the main loop does 4 FFMA" in unrolled.text
    assert (unrolled.lines, unrolled.offsets) == ((1,), (2 * 16, 12 * 16))
    (tail,) = texts(remarks, "Tail loops")
    assert "main loop of 4 iterations a trip there are a loop of 1 (at 0x00d0)" in tail
    (hoisted,) = texts(remarks, "Loads hoisted")
    assert "4 of the 4 loads of one trip are issued before its first FFMA (in PTX 0)" in hoisted
    assert "up to 4 are in flight" in hoisted
    assert texts(remarks, "Not vectorised")[0].startswith("4 loads of one thread")
    assert texts(remarks, "Redundant zero-init")[0].startswith(
        "1 redundant zero-initialisation (R5)"
    )
    assert "1 NOPs after it" in texts(remarks, "Trailing self-branch")[0]
    assert "5 FFMA (fp32 multiply-add), 5 of them inside loops" in texts(remarks, "Arithmetic")[0]
    assert "5 loads from global memory (LDG): 5 of 4 bytes" in texts(remarks, "Memory width")[0]


def test_copies_in_ptx_tell_who_unrolled() -> None:
    """Four FFMA a trip that were made of two PTX lines: the front end made two, ptxas four."""
    ptx = """.entry k(
)
{
fma.rn.f32 %f1, %f2, %f3, %f1;
fma.rn.f32 %f1, %f2, %f3, %f1;
ret;
}"""
    body = LOOP_SASS
    for number in (4, 5, 4, 5):
        old = next(line for line in body.splitlines() if line.startswith("FFMA R5, R"))
        body = body.replace(old, f"#.nv_debug_ptx_txt {number}\nFFMA  R5, {old[9:]}", 1)
    (said,) = texts(notes(listing(body, LOOP_SOURCE, ptx)), "Unrolling")
    assert "x2 in PTX by the front end and x4 in SASS: ptxas unrolled once more" in said


def test_a_register_that_is_reused_in_the_body_is_no_counter() -> None:
    """Rung 07 was once said to be unrolled x512: an address register shared the counter's name."""
    body = """
        #/octavo/k.cu 1
        .L_x_1:
        #/octavo/k.cu 2
        IADD3 R4, R4, 0x2000, RZ
        LDS R4, [R4]
        FFMA R5, R4, R6, R5
        FFMA R5, R4, R6, R5
        #/octavo/k.cu 1
        VIADD R0, R0, 0x1
        MOV R4, R0
        ISETP.GE.AND P0, PT, R4, R9, PT
        @!P0 BRA `(.L_x_1)
        EXIT
    """
    assert "no sign of unrolling" in texts(notes(listing(body, LOOP_SOURCE)), "Unrolling")[0]
    direct = body.replace("MOV R4, R0", "NOP").replace("PT, R4, R9", "PT, R0, R9")
    assert "unrolled x1 in SASS" in texts(notes(listing(direct, LOOP_SOURCE)), "Unrolling")[0]


def test_work_in_a_lambda_belongs_to_the_loop_that_calls_it() -> None:
    source = """#line 1 "/octavo/k.cu"
for (int tile = 0; tile < tiles; ++tile) {
  const auto work = [&] { sum += a * b; };
  for (int k = 0; k < n; ++k) {
    work();
  }
}
"""
    text = """.text.k:
.L_a:
\t//## File "/octavo/k.cu", line 1
        /*0000*/                   MOV R1, RZ ;
.L_b:
\t//## File "/octavo/k.cu", line 2 inlined at "/octavo/k.cu", line 4
\t//## File "/octavo/k.cu", line 4
        /*0010*/                   FFMA R5, R8, R6, R5 ;
\t//## File "/octavo/k.cu", line 3
        /*0020*/               @P0 BRA `(.L_b) ;
\t//## File "/octavo/k.cu", line 1
        /*0030*/               @P1 BRA `(.L_a) ;
        /*0040*/                   EXIT ;
"""
    assembly = from_listings(source, "", parse_sass(text)["k"], PLAIN)
    written = source_loops(assembly)
    found = {x.line: unrolling(assembly, x, written).counted for x in written}
    assert found == {1: "", 3: "FFMA"}


def test_a_loop_without_a_branch_left_is_gone() -> None:
    body = "#/octavo/k.cu 2\nFFMA R5, R8, R6, R5\nFFMA R5, R9, R6, R5\nEXIT"
    remarks = notes(listing(body, LOOP_SOURCE))
    assert "constant: line 1." in texts(remarks, "Loops gone")[0]
    assert not texts(remarks, "Unrolling")


def test_spills_tma_fences_and_registers_are_named() -> None:
    remarks = notes(
        listing(
            """
            USETMAXREG.DEALLOC.CTAPOOL 0x28
            STL [R1], R2
            LDL R2, [R1]
            .L_x_1:
            UTMALDG.2D.MULTICAST [UR8], [UR6], UR4
            HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], !UPT
            WARPGROUP.DEPBAR.LE gsb0, 0x1
            MEMBAR.ALL.GPU
            @P0 BRA `(.L_x_1)
            FENCE.VIEW.ASYNC.S
            UTMASTG.2D [UR4], [UR6]
            EXIT
            FADD R1, R2, R3
            """
        )
    )
    first, second = texts(remarks, "Registers")
    assert "SPILLS" in first
    assert "2 local-memory instructions" in first
    assert "gives registers back, down to 40 a thread" in second
    shape, wait = texts(remarks, "Tensor core")
    assert "64x16 tile by a 16x256 tile, both in shared memory, into 128 fp32" in shape
    assert "In 1 the result replaces" in shape
    assert "1 wait for wgmma (WARPGROUP.DEPBAR) until all but 1 group is done" in wait
    load, store = texts(remarks, "TMA")
    assert "1 TMA load (UTMALDG)" in load
    assert "1 are MULTICAST" in load
    assert store == "1 TMA store (UTMASTG); 1 proxy fence in all."
    assert texts(remarks, "Dear fence")[0].startswith("1 GPU-wide memory fence")
    assert texts(remarks, "Dead code") == ["1 instruction that control can never reach."]


def test_tensor_core_time_by_hand() -> None:
    steps = listing(
        "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24\nQGMMA.64x64x32.F32.E4M3.E4M3 R24, x\nEXIT"
    ).sass.instructions
    assert [tensor_clocks(step) for step in steps] == [128, 32, 0]


def test_widths_and_loads_in_flight() -> None:
    widths = {"LDG.E": 4, "LDG.E.64": 8, "LDG.E.128": 16, "STG.E.U16": 2, "LDS.U8": 1}
    assert {opcode: access_bytes(opcode) for opcode in widths} == widths
    body = listing(
        "LDG.E R1, [R9]\nLDG.E R2, [R9]\nFADD R3, R1, R2\nLDG.E R4, [R9]\nFADD R3, R3, R4\nEXIT"
    )
    assert most_in_flight(body.sass.instructions) == 2


def test_the_careful_readers_findings_on_the_naive_kernel() -> None:
    """Row A5: x4 in PTX, x16 in SASS, loads hoisted, tails, a redundant zero, the self-branch."""
    assembly, remarks = built("02_naive")
    source = assembly.files[assembly.main]
    (line,) = [n for n, text in source.items() if "for (int k" in text]
    (unrolled,) = texts(remarks, "Unrolling")
    assert f"(line {line}) is unrolled x4 in PTX by the front end and x16 in SASS" in unrolled
    (tail,) = texts(remarks, "Tail loops")
    assert re.search(r"main loop of 16 .* of 8 \(at .* of 4 \(at .* of 1 \(at", tail)
    (hoisted,) = texts(remarks, "Loads hoisted")
    found = re.search(r"(\d+) of the 32 loads .* \(in PTX 2\), and up to (\d+) are in", hoisted)
    assert found is not None
    assert min(map(int, found.groups())) >= 8
    assert f"{16 + 8 + 4 + 1} FFMA" in texts(remarks, "Arithmetic")[0]
    assert "21 of them inside loops" in texts(remarks, "Arithmetic")[0]
    assert f"(LDG): {2 * 29} of 4 bytes a thread. None uses" in texts(remarks, "Memory width")[0]
    assert texts(remarks, "Not vectorised")[0].startswith("16 loads")
    assert re.match(r"[1-9]\d* redundant", texts(remarks, "Redundant zero-init")[0])
    assert texts(remarks, "Predicates")[0].startswith("`@P0 EXIT` at")
    assert "branches to itself" in texts(remarks, "Trailing self-branch")[0]
    assert "no spills, no stack, no local memory" in texts(remarks, "Registers")[0]


def test_source_ptx_and_sass_of_the_naive_kernel_are_aligned() -> None:
    assembly, _ = built("02_naive")
    (line,) = [n for n, t in assembly.files[assembly.main].items() if "sum +=" in t]
    for step in assembly.sass.instructions:
        if step.root == "FFMA":
            assert assembly.home_line(step) == line
            assert step.ptx_line is not None
            assert "fma.rn.f32" in assembly.ptx_lines[step.ptx_line - 1]
        if step.root == "LDG":
            assert step.ptx_line is not None
            assert "ld.global.f32" in assembly.ptx_lines[step.ptx_line - 1]


def test_shared_memory_tiles_unroll_their_inner_loop_away() -> None:
    assembly, remarks = built("03_smem_tiles")
    source = assembly.files[assembly.main]
    inner = [n for n, text in source.items() if "for (int step" in text]
    (gone,) = [n for n in remarks if n.kind == "Loops gone"]
    assert set(inner) <= set(gone.lines)
    assert any("from shared memory (LDS)" in text for text in texts(remarks, "Memory width"))
    assert re.search(r"[2-9] CTA barriers", texts(remarks, "Barriers")[0])


def test_the_first_tensor_core_rung() -> None:
    assembly, remarks = built("09_tma_wgmma")
    shape = re.match(r"(\d+) HGMMA\.64x64x16\.", texts(remarks, "Tensor core")[0])
    assert shape is not None
    assert int(shape[1]) % 4 == 0  # BLOCK_K of 64 is four steps of 16
    assert texts(remarks, "TMA")[0].startswith("2 TMA loads")
    assert "is not unrolled: one trip is one iteration" in texts(remarks, "Unrolling")[0]
    loops = source_loops(assembly)
    outer = next(x for x in loops if "BLOCK_K" in x.text and x.file == assembly.main)
    assert unrolling(assembly, outer, loops).counted == "HGMMA"


def test_a_trip_leaves_out_the_slow_paths_of_waits() -> None:
    _, remarks = built("22_lean_loop")
    [text] = [one for one in texts(remarks, "Instruction mix") if "24 tensor core" in one]
    first, last, count = re.findall("0x[0-9a-f]+|[0-9]+(?= instructions)", text)[:3]
    assert (int(last, 16) - int(first, 16)) // 16 + 1 == int(count) < 170


def test_text_shows_every_source_line_that_made_code_and_folds_the_rest() -> None:
    assembly, remarks = built("02_naive")
    text = render_text(assembly, remarks)
    assert "Unrolling" in text
    assert "... and" in text
    assert max(map(len, text.splitlines())) <= 132
    for number in {n for s in assembly.ptx if (n := assembly.home_line(s))}:
        assert re.search(rf"^ *{number} \| ", text, re.MULTILINE)
    whole = render_text(assembly, remarks, most=0)
    shown = set(re.findall(r"\s([0-9a-f]{4,})  (?:@!?U?P\w+ )?[A-Z]", whole))
    assert {f"{s.at:04x}" for s in assembly.sass.instructions} <= shown


def test_register_lists_of_wgmma_are_shortened() -> None:
    names = ", ".join(f"%f{n}" for n in range(128))
    short = short_operands(f"wgmma.mma_async {{{names}}}, %rd1, %rd2, 1")
    assert short == "wgmma.mma_async {%f0, ... 128 registers}, %rd1, %rd2, 1"
    assert short_operands("mov.b64 {%r1, %r2}, %rd1") == "mov.b64 {%r1, %r2}, %rd1"


def test_an_unknown_kernel_is_an_error_that_lists_them() -> None:
    with pytest.raises(KernelError, match="no kernel 'two', only one"):
        assemble('extern "C" __global__ void one() {}', "x.cu", "two")
    with pytest.raises(KernelError, match=r"x\.cu has no kernel$"):
        assemble("", "x.cu")


def test_serialized_wgmma_is_said_first() -> None:
    log = "ptxas info : (C7511) Potential Performance Loss\n(C7519) x\n(C7519) y\n"
    assembly = listing("EXIT")
    assembly.log = log
    first, second = notes(assembly)[:2]
    assert first.text.startswith("ptxas said C7511 once")
    assert "SERIALIZED" in first.text
    assert second.text.startswith("ptxas said C7519 2 times")
    assert not texts(notes(listing("EXIT")), "Compiler warning")
