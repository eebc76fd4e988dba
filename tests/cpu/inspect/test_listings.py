"""Parsers and control flow on small listings whose answers are plain to the eye."""

from __future__ import annotations

import pytest

from octavo.errors import KernelError
from octavo.inspect.flow import edges, loops, reachable, redundant_zeros
from octavo.inspect.sass import (
    Location,
    SassKernel,
    disassemble,
    find_tool,
    parse_ptx,
    parse_sass,
)
from tests.cpu.inspect.listings import LOOP_SASS, sass_text


def kernel(body: str) -> SassKernel:
    return parse_sass(sass_text(body))["k"]


def test_an_instruction_is_split_into_guard_opcode_operands_and_target() -> None:
    found = kernel("@!P0 BRA `(.L_x_1)\nUTMALDG.2D.MULTICAST [UR8], [UR6], UR4\n.L_x_1:\nEXIT")
    branch, load, leave = found.instructions
    assert (branch.guard, branch.opcode, branch.target) == ("!P0", "BRA", 2)
    assert (load.root, load.opcode) == ("UTMALDG", "UTMALDG.2D.MULTICAST")
    assert load.operands == "[UR8], [UR6], UR4"
    assert (leave.at, found.labels) == (32, {".L_x_1": 2})
    assert branch.text == "@!P0 BRA `(.L_x_1)"


def test_counting_stops_at_dot_borders() -> None:
    found = kernel("LDG.E R1, [R2]\nLDG.E.128 R4, [R2]\nLDGSTS.E [R1], [R2]\nEXIT")
    assert (found.count("LDG"), found.count("LDG.E.128"), found.count("LD")) == (2, 1, 0)


def test_inlined_lines_keep_their_callers_innermost_first() -> None:
    text = "\n".join(
        [
            ".text.k:",
            '\t//## File "/octavo/x.cuh", line 2 inlined at "/octavo/x.cuh", line 5',
            '\t//## File "/octavo/x.cuh", line 5 inlined at "/octavo/k.cu", line 9',
            '\t//## File "/octavo/k.cu", line 9',
            "        /*0000*/                   FADD R1, R2, R3 ;",
            '\t//## File "/octavo/k.cu", line 10',
            "        /*0010*/                   EXIT ;",
        ]
    )
    add, leave = parse_sass(text)["k"].instructions
    assert add.locations == (
        Location("/octavo/x.cuh", 2),
        Location("/octavo/x.cuh", 5),
        Location("/octavo/k.cu", 9),
    )
    assert leave.locations == (Location("/octavo/k.cu", 10),)


def test_ptx_lines_stand_beside_source_lines() -> None:
    text = sass_text(
        "#/octavo/k.cu 3\n#.nv_debug_ptx_txt 31\nFADD R1, R2, R3\n#.nv_debug_ptx_txt 40\nEXIT"
    )
    found = parse_sass(text)["k"].instructions
    assert [(i.ptx_line, i.locations) for i in found] == [
        (31, (Location("/octavo/k.cu", 3),)),
        (40, (Location("/octavo/k.cu", 3),)),
    ]


def test_loops_and_the_self_branch() -> None:
    found = kernel(LOOP_SASS)
    first, second = loops(found)
    assert (first.first, first.last) == (2, 12)
    assert (second.first, second.last) == (13, 17)
    last = found.instructions[-2]
    assert last.opcode == "BRA"
    assert len(found.instructions) - 2 not in reachable(edges(found))


def test_a_slow_path_moved_out_of_line_makes_no_loop() -> None:
    """ptxas puts the retry of a barrier wait behind the kernel's end; it jumps back to the middle."""
    found = kernel(
        """
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
        @!P0 BRA `(.L_slow)
        .L_on:
        FADD R1, R1, R2
        EXIT
        .L_slow:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
        @!P0 BRA `(.L_slow)
        BRA `(.L_on)
        """
    )
    assert [(x.first, x.last) for x in loops(found)] == [(4, 5)]


def test_nested_loops_have_depth() -> None:
    found = kernel(
        """
        .L_a:
        FADD R1, R1, R2
        .L_b:
        FADD R1, R1, R2
        @P0 BRA `(.L_b)
        @P1 BRA `(.L_a)
        EXIT
        """
    )
    assert [(x.first, x.last, x.depth) for x in loops(found)] == [(0, 3, 0), (1, 2, 1)]


@pytest.mark.parametrize(
    ("body", "again"),
    [
        ("MOV R1, RZ\nHFMA2.MMA R1, -RZ, RZ, 0, 0\nEXIT", [1]),
        ("MOV R1, RZ\nFADD R1, R1, R2\nMOV R1, RZ\nEXIT", []),
        ("CS2R R4, SRZ\nMOV R5, RZ\nEXIT", [1]),
        # The load overwrites the pair R4, R5, so R5 is not zero any more.
        ("CS2R R4, SRZ\nLDG.E.64 R4, desc[UR4][R2.64]\nMOV R5, RZ\nEXIT", []),
        # Only some threads write R1 first: the second write is needed.
        ("@P0 MOV R1, RZ\nMOV R1, RZ\nEXIT", []),
        # One of two ways to .L_j does not zero R1.
        ("@P0 BRA `(.L_j)\nMOV R1, RZ\n.L_j:\nMOV R1, RZ\nEXIT", []),
        # Both do.
        ("MOV R1, RZ\n@P0 BRA `(.L_j)\nFADD R2, R2, R3\n.L_j:\nMOV R1, RZ\nEXIT", [3]),
        # In a loop that dirties R1 the zero is needed in each trip.
        ("MOV R1, RZ\n.L_l:\nMOV R1, RZ\nFADD R1, R1, R2\n@P0 BRA `(.L_l)\nEXIT", []),
        # A wgmma writes 128 registers from R24 on.
        ("MOV R150, RZ\nHGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24\nMOV R150, RZ\nEXIT", []),
        ("UMOV UR4, URZ\nUMOV UR4, URZ\nEXIT", [1]),
    ],
)
def test_redundant_zeros_are_those_on_every_path(body: str, again: list[int]) -> None:
    assert redundant_zeros(kernel(body)) == again


PTX = """
.version 9.0
.visible .entry k(
\t.param .u64 k_param_0
)
{
\t.reg .f32 \t%f<9>;
\t.loc\t1 3 5
\tld.param.u64 \t%rd1, [k_param_0];
$L__BB0_1:
\t.loc\t2 7 1, function_name $L__info_string0, inlined_at 1 4 9
\tfma.rn.f32 \t%f1, %f2, %f3, %f1;
\t// begin inline asm
\t{
LAB:
mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;
@p bra DONE;
bra LAB;
DONE:
}
\t// end inline asm
\t.loc\t1 4 2
\t@%p1 bra \t$L__BB0_1;
\t{
LAB:
@p bra DONE;
bra LAB;
DONE:
}
\tret;
}
\t.file\t1 "/octavo/k.cu"
\t.file\t2 "/octavo/x.cuh"
\t.section\t.debug_str
"""


def test_ptx_lines_and_callers() -> None:
    found = parse_ptx(PTX)["k"]
    load, fma = found[:2]
    assert (load.at, load.root, load.locations) == (9, "ld", (Location("/octavo/k.cu", 3),))
    assert fma.locations == (Location("/octavo/x.cuh", 7), Location("/octavo/k.cu", 4))
    assert (fma.opcode, fma.names[0], fma.guard) == ("fma.rn.f32", "%f1", "")


def test_ptx_of_inline_assembly_is_read_to_the_end_of_the_kernel() -> None:
    found = parse_ptx(PTX)["k"]
    wait, done = found[2:4]
    assert (wait.at, wait.opcode) == (16, "mbarrier.try_wait.parity.shared::cta.b64")
    assert (done.guard, done.text) == ("p", "@p bra DONE")
    assert found[-1].opcode == "ret"
    one_line = (
        ".entry k(\n)\n{\n{ .reg .pred P1; WAIT: mov.b32 {%r1, %r2}, %rd1; @P1 bra WAIT; }\n}"
    )
    assert [step.text for step in parse_ptx(one_line)["k"]] == [
        "mov.b32 {%r1, %r2}, %rd1",
        "@P1 bra WAIT",
    ]


def test_a_broken_cubin_and_a_missing_tool_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="nvdisasm failed"):
        disassemble(b"not an ELF file")
    with pytest.raises(KernelError, match="nvfoo is missing"):
        find_tool("nvfoo")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KernelError, match=r"pip install -e '\.\[kernels\]'"):
        find_tool("nvdisasm")
