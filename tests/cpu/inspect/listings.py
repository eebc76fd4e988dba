"""Small hand-made listings in the form that nvdisasm and NVRTC print."""

from __future__ import annotations

from octavo.inspect.asm import Assembly, from_listings
from octavo.inspect.sass import parse_sass
from octavo.kernels.jit import KernelResources

PLAIN = KernelResources(32, 0, 0, 0, 0)


def sass_text(body: str, name: str = "k") -> str:
    """An nvdisasm listing of one kernel: one instruction, `label:` or `file:line` mark a line."""
    lines = [f".text.{name}:"]
    offset = 0
    for line in body.strip().splitlines():
        line = line.strip()
        if line.startswith("."):
            lines.append(line)
        elif line.startswith("#"):
            file, number = line[1:].split()
            lines.append(f'\t//## File "{file}", line {number}')
        else:
            lines.append(f"        /*{offset:04x}*/                   {line} ;")
            offset += 16
    return "\n".join(lines)


def listing(body: str, source: str = "", ptx: str = "") -> Assembly:
    kernel = parse_sass(sass_text(body))["k"]
    return from_listings(source, ptx, kernel, PLAIN)


# Two lines of source whose loop was unrolled by 4 in SASS, with a tail of 1.
LOOP_SOURCE = """#line 1 "/octavo/k.cu"
for (int i = 0; i < n; ++i) {
  sum += a[i] * b;
}
"""
LOOP_SASS = """
#/octavo/k.cu 1
MOV R5, RZ
MOV R5, RZ
.L_x_1:
#/octavo/k.cu 2
LDG.E R8, desc[UR4][R2.64]
LDG.E R9, desc[UR4][R2.64+0x4]
LDG.E R10, desc[UR4][R2.64+0x8]
LDG.E R11, desc[UR4][R2.64+0xc]
FFMA R5, R8, R6, R5
FFMA R5, R9, R6, R5
FFMA R5, R10, R6, R5
FFMA R5, R11, R6, R5
#/octavo/k.cu 1
VIADD R0, R0, 0xfffffffc
ISETP.GT.AND P0, PT, R0, 0x3, PT
@P0 BRA `(.L_x_1)
.L_x_2:
#/octavo/k.cu 2
LDG.E R8, desc[UR4][R2.64]
FFMA R5, R8, R6, R5
#/octavo/k.cu 1
VIADD R0, R0, 0xffffffff
ISETP.NE.AND P0, PT, R0, RZ, PT
@P0 BRA `(.L_x_2)
#/octavo/k.cu 4
STG.E desc[UR4][R2.64], R5
EXIT
.L_x_3:
BRA `(.L_x_3)
NOP
"""
