"""Remarks: on a listing made by hand, and on what NVRTC 13.0.88 really does to rungs of the ladder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from octavo.errors import KernelError
from octavo.inspect.asm import Assembly, Note, assemble, from_listings
from octavo.inspect.asm_text import render_text, short_operands
from octavo.inspect.notes import notes
from octavo.inspect.notes_loops import most_in_flight, tensor_clocks
from octavo.inspect.notes_machine import access_bytes
from octavo.inspect.sass import parse_sass
from octavo.inspect.source_loops import source_loops, unrolling
from octavo.kernels.matmul.registry import rung
from tests.cpu.inspect.listings import LOOP_SASS, LOOP_SOURCE, PLAIN, listing


def facts(remarks: list[Note], kind: str) -> list[Mapping[str, Any]]:
    return [n.facts for n in remarks if n.kind == kind]


@cache
def built(name: str) -> tuple[Assembly, list[Note]]:
    found = rung(name)
    assembly = assemble(found.source, found.path.name, found.entry)
    return assembly, notes(assembly)


def test_a_loop_unrolled_by_four_with_a_tail() -> None:
    remarks = notes(listing(LOOP_SASS, LOOP_SOURCE))
    assert facts(remarks, "Unrolling") == [{"line": 1, "ptx": None, "sass": 4}]
    assert facts(remarks, "Tail loops") == [{"line": 1, "main": 4, "tails": [1]}]
    (hoisted,) = facts(remarks, "Loads hoisted")
    assert hoisted == {"early": 4, "loads": 4, "early_ptx": 0, "in_flight": 4}
    assert facts(remarks, "Not vectorised") == [{"loads": 4}]
    assert facts(remarks, "Redundant zero-init") == [{"count": 1}]
    assert facts(remarks, "Trailing self-branch") == [{"count": 1, "nops": 1}]
    assert facts(remarks, "Arithmetic") == [{"FFMA": 5, "in_loops": 5}]
    assert {"opcode": "LDG", "bytes4": 5} in facts(remarks, "Memory width")


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
    assert facts(notes(listing(body, LOOP_SOURCE)), "Unrolling") == [
        {"line": 1, "ptx": None, "sass": None}
    ]
    direct = body.replace("MOV R4, R0", "NOP").replace("PT, R4, R9", "PT, R0, R9")
    assert facts(notes(listing(direct, LOOP_SOURCE)), "Unrolling") == [
        {"line": 1, "ptx": None, "sass": 1}
    ]


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
    found = {x.line: unrolling(assembly, x, written, "sass").counted for x in written}
    assert found == {1: "", 3: "FFMA"}


def test_a_loop_without_a_branch_left_is_gone() -> None:
    body = "#/octavo/k.cu 2\nFFMA R5, R8, R6, R5\nFFMA R5, R9, R6, R5\nEXIT"
    remarks = notes(listing(body, LOOP_SOURCE))
    assert facts(remarks, "Loops gone") == [{"lines": (1,), "by": "the front end"}]
    assert not facts(remarks, "Unrolling")


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
    registers = facts(remarks, "Registers")
    assert registers[0]["local"] == 2
    assert "SPILLS" in remarks[0].text
    assert registers[1] == {"to": 40}
    tensor = facts(remarks, "Tensor core")
    assert (tensor[0]["m"], tensor[0]["n"], tensor[0]["k"]) == (64, 256, 16)
    assert (tensor[0]["count"], tensor[0]["clears"]) == (1, 1)
    assert tensor[1] == {"waits": 1, "left": 1}
    assert facts(remarks, "TMA") == [{"loads": 1, "multicast": 1}, {"stores": 1, "fences": 1}]
    assert facts(remarks, "Dear fence") == [{"in_loops": 1}]
    assert facts(remarks, "Dead code") == [{"count": 1}]


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
    assert facts(remarks, "Unrolling") == [{"line": line, "ptx": 4, "sass": 16}]
    assert facts(remarks, "Tail loops") == [{"line": line, "main": 16, "tails": [8, 4, 1]}]
    (hoisted,) = facts(remarks, "Loads hoisted")
    assert hoisted["loads"] == 32
    assert hoisted["early_ptx"] == 2
    assert hoisted["early"] >= 8
    assert hoisted["in_flight"] >= 8
    assert facts(remarks, "Arithmetic") == [{"FFMA": 16 + 8 + 4 + 1, "in_loops": 21}]
    assert {"opcode": "LDG", "bytes4": 2 * 29} in facts(remarks, "Memory width")
    assert facts(remarks, "Not vectorised") == [{"loads": 16}]
    (zeros,) = facts(remarks, "Redundant zero-init")
    assert zeros["count"] >= 1
    assert facts(remarks, "Predicates")[0] == {"exits": 1}
    assert facts(remarks, "Trailing self-branch")[0]["count"] == 1
    registers = facts(remarks, "Registers")[0]
    assert (registers["spills"], registers["local"], registers["stack"]) == (0, 0, 0)


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
    (gone,) = facts(remarks, "Loops gone")
    assert set(inner) <= set(gone["lines"])
    assert any(f["opcode"] == "LDS" for f in facts(remarks, "Memory width") if "opcode" in f)
    assert facts(remarks, "Barriers")[0]["BAR"] >= 2


def test_the_first_tensor_core_rung() -> None:
    assembly, remarks = built("09_tma_wgmma")
    (shape,) = [f for f in facts(remarks, "Tensor core") if "opcode" in f]
    assert (shape["m"], shape["n"], shape["k"]) == (64, 64, 16)
    assert shape["count"] % 4 == 0  # BLOCK_K of 64 is four steps of 16
    assert facts(remarks, "TMA")[0] == {"loads": 2, "multicast": 0}
    loops = source_loops(assembly)
    outer = next(x for x in loops if "BLOCK_K" in x.text and x.file == assembly.main)
    assert unrolling(assembly, outer, loops, "sass").counted == "HGMMA"


def test_text_shows_every_source_line_that_made_code_and_folds_the_rest() -> None:
    assembly, remarks = built("02_naive")
    text = render_text(assembly, remarks)
    assert "Unrolling" in text
    assert "... and" in text
    assert max(map(len, text.splitlines())) <= 132
    for number in {n for s in assembly.ptx.instructions if (n := assembly.home_line(s))}:
        assert re.search(rf"^ *{number} \| ", text, re.MULTILINE)
    whole = render_text(assembly, remarks, most=0)
    shown = set(re.findall(r"\s([0-9a-f]{4,})  (?:@!?U?P\w+ )?[A-Z]", whole))
    assert {f"{s.offset:04x}" for s in assembly.sass.instructions} <= shown


def test_register_lists_of_wgmma_are_shortened() -> None:
    names = ", ".join(f"%f{n}" for n in range(128))
    short = short_operands(f"wgmma.mma_async {{{names}}}, %rd1, %rd2, 1")
    assert short == "wgmma.mma_async {%f0, ... 128 registers}, %rd1, %rd2, 1"
    assert short_operands("mov.b64 {%r1, %r2}, %rd1") == "mov.b64 {%r1, %r2}, %rd1"


def test_an_unknown_kernel_is_an_error_that_lists_them() -> None:
    with pytest.raises(KernelError, match="only one"):
        assemble('extern "C" __global__ void one() {}', "x.cu", "two")


def test_serialized_wgmma_is_said_first() -> None:
    log = "ptxas info : (C7511) Potential Performance Loss\n(C7519) x\n(C7519) y\n"
    assembly = listing("EXIT")
    assembly.log = log
    first, second = notes(assembly)[:2]
    assert first.facts == {"code": "7511", "count": 1}
    assert "SERIALIZED" in first.text
    assert second.facts == {"code": "7519", "count": 2}
    assert not facts(notes(listing("EXIT")), "Compiler warning")
