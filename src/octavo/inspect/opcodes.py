"""Owns what each SASS opcode is, in plain words, and the group it is counted under.

Keys are the first part of the opcode ("LDG" of "LDG.E.128"). The words are ours; NVIDIA's own list
is in the CUDA Binary Utilities manual, "Hopper instruction set".
"""

from __future__ import annotations

MATH, TENSOR, LOAD, STORE, INTEGER = "math", "tensor core", "load", "store", "address"
MOVE, CONTROL, SYNC, TMA, OTHER = "move", "control", "sync", "TMA", "other"

# opcode -> (group, what it does)
OPCODES: dict[str, tuple[str, str]] = {
    "FFMA": (MATH, "fp32 fused multiply-add: a * b + c, one rounding"),
    "FADD": (MATH, "fp32 add"),
    "FMUL": (MATH, "fp32 multiply"),
    "HFMA2": (MATH, "two 16-bit multiply-adds; with -RZ, RZ operands a way to write a constant"),
    "HADD2": (MATH, "two 16-bit adds"),
    "HMUL2": (MATH, "two 16-bit multiplies"),
    "FSEL": (MATH, "choose one of two floats by a predicate"),
    "FMNMX": (MATH, "fp32 minimum or maximum"),
    "MUFU": (MATH, "special function: reciprocal, square root, exp2, ..."),
    "F2F": (MATH, "convert between float types"),
    "F2FP": (MATH, "pack two fp32 into two 16-bit floats"),
    "I2F": (MATH, "integer to float"),
    "F2I": (MATH, "float to integer"),
    "HGMMA": (
        TENSOR,
        "wgmma: a warpgroup (128 threads) multiplies 16-bit tiles from shared memory",
    ),
    "QGMMA": (TENSOR, "wgmma on 8-bit floats"),
    "IGMMA": (TENSOR, "wgmma on 8-bit integers"),
    "HMMA": (TENSOR, "mma.sync: one warp multiplies tiles held in registers"),
    "WARPGROUP": (TENSOR, "ARRIVE fences registers before wgmma; DEPBAR waits for wgmma groups"),
    "LDG": (LOAD, "load from global memory (L1, then L2, then DRAM)"),
    "LDS": (LOAD, "load from shared memory"),
    "LDSM": (LOAD, "ldmatrix: a warp loads 8x8 matrices from shared memory"),
    "LDL": (LOAD, "load from local memory: a spilled register or a stack array"),
    "LDC": (LOAD, "load a kernel parameter or constant"),
    "ULDC": (LOAD, "load a parameter into a uniform register, shared by the warp"),
    "LD": (LOAD, "load through a generic pointer"),
    "LDGSTS": (LOAD, "cp.async: copy from global to shared memory past the registers"),
    "STG": (STORE, "store to global memory"),
    "STS": (STORE, "store to shared memory"),
    "STSM": (STORE, "stmatrix: a warp stores 8x8 matrices to shared memory"),
    "STL": (STORE, "store to local memory: a register spill or a stack array"),
    "ST": (STORE, "store through a generic pointer"),
    "RED": (STORE, "atomic add without reading the result"),
    "ATOMG": (STORE, "atomic on global memory"),
    "ATOMS": (STORE, "atomic on shared memory"),
    "UTMALDG": (TMA, "TMA load: one thread asks for a whole tile, global to shared memory"),
    "UTMASTG": (TMA, "TMA store: a whole tile, shared to global memory"),
    "UTMAREDG": (TMA, "TMA reduction: add a tile to global memory"),
    "UTMAPF": (TMA, "TMA prefetch of a tile into L2"),
    "UTMACCTL": (TMA, "prefetch or invalidate a TMA descriptor"),
    "UTMACMDFLUSH": (TMA, "close the group of TMA stores issued so far"),
    "UBLKCP": (TMA, "bulk copy of contiguous bytes"),
    "IMAD": (INTEGER, "integer multiply-add; .MOV and .SHL forms are moves and shifts"),
    "IADD3": (INTEGER, "add three integers; .X uses the carry of the low half"),
    "VIADD": (INTEGER, "add two integers"),
    "LEA": (INTEGER, "shift and add: base + index * size"),
    "LOP3": (INTEGER, "any logic function of three operands"),
    "SHF": (INTEGER, "shift"),
    "BFE": (INTEGER, "extract a bit field"),
    "PRMT": (INTEGER, "pick bytes out of two registers"),
    "SEL": (INTEGER, "choose one of two integers by a predicate"),
    "ISETP": (INTEGER, "compare integers into a predicate"),
    "FSETP": (INTEGER, "compare floats into a predicate"),
    "PLOP3": (INTEGER, "logic on predicates; with constants, sets one to true or false"),
    "UIADD3": (INTEGER, "integer add on the uniform datapath (once a warp)"),
    "UIMAD": (INTEGER, "integer multiply-add on the uniform datapath"),
    "ULEA": (INTEGER, "shift and add on the uniform datapath"),
    "ULOP3": (INTEGER, "logic on the uniform datapath"),
    "USHF": (INTEGER, "shift on the uniform datapath"),
    "UISETP": (INTEGER, "compare on the uniform datapath"),
    "USEL": (INTEGER, "choose on the uniform datapath"),
    "UPLOP3": (INTEGER, "predicate logic on the uniform datapath"),
    "MOV": (MOVE, "copy a register or constant"),
    "UMOV": (MOVE, "copy into a uniform register"),
    "CS2R": (MOVE, "read a special register; from SRZ, write 64 zero bits"),
    "S2R": (MOVE, "read a special register: thread or block index, ..."),
    "S2UR": (MOVE, "read a special register into a uniform register"),
    "R2UR": (MOVE, "register to uniform register (the warp must agree)"),
    "SHFL": (MOVE, "exchange a register between threads of a warp"),
    "P2R": (MOVE, "predicates to register"),
    "R2P": (MOVE, "register to predicates"),
    "BRA": (CONTROL, "branch"),
    "EXIT": (CONTROL, "end of this thread"),
    "BSSY": (CONTROL, "name the point where diverged threads meet again"),
    "BSYNC": (CONTROL, "wait there for the others"),
    "CALL": (CONTROL, "call a function"),
    "RET": (CONTROL, "return"),
    "NOP": (CONTROL, "nothing; fills the last 128 bytes"),
    "ELECT": (CONTROL, "elect one thread of the warp"),
    "VOTEU": (CONTROL, "which threads of the warp are here"),
    "WARPSYNC": (SYNC, "the threads of a warp meet"),
    "NANOSLEEP": (SYNC, "sleep for a moment"),
    "BAR": (SYNC, "barrier among the threads of a CTA"),
    "SYNCS": (SYNC, "mbarrier: initialise, arrive, or (PHASECHK) ask whether a phase is over"),
    "FENCE": (SYNC, "make ordinary shared-memory writes visible to TMA and wgmma, or back"),
    "MEMBAR": (SYNC, "memory fence; .GPU is far dearer than .CTA"),
    "ERRBAR": (SYNC, "part of a memory fence"),
    "CCTL": (SYNC, "cache control, part of an acquire fence"),
    "DEPBAR": (SYNC, "wait for earlier loads"),
    "LDGDEPBAR": (SYNC, "close a group of cp.async copies"),
    "UTMACMDWAIT": (SYNC, "wait for TMA stores"),
    "UCGABAR_ARV": (SYNC, "arrive at the cluster barrier"),
    "UCGABAR_WAIT": (SYNC, "wait at the cluster barrier"),
    "ACQBULK": (SYNC, "griddepcontrol.wait: wait for the kernel before"),
    "PREEXIT": (SYNC, "griddepcontrol.launch_dependents: let the next kernel start"),
    "USETMAXREG": (OTHER, "setmaxnreg: give registers back to the CTA, or take more"),
    "SETMAXREG": (OTHER, "setmaxnreg: give registers back to the CTA, or take more"),
}

GROUP_ORDER = (TENSOR, MATH, LOAD, STORE, TMA, SYNC, INTEGER, MOVE, CONTROL, OTHER)


def group_of(root: str, opcode: str = "") -> str:
    """The group an instruction is counted under; unknown opcodes are "other"."""
    if opcode.startswith(("IMAD.MOV", "HFMA2.MMA")):
        return MOVE
    return OPCODES.get(root, (OTHER, ""))[0]


def words_of(root: str) -> str:
    """What the opcode does, or an empty text for one we do not know."""
    return OPCODES.get(root, (OTHER, ""))[1]
