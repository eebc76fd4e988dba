"""Owns what each SASS opcode is, in plain words, and the group it is counted under.

The words are ours; NVIDIA's own list is in the CUDA Binary Utilities manual, "Hopper instruction set".
"""

from __future__ import annotations

from octavo.inspect.listing import Step

MATH, TENSOR, LOAD, STORE, INTEGER = "math", "tensor core", "load", "store", "address"
MOVE, CONTROL, SYNC, TMA, OTHER = "move", "control", "sync", "TMA", "other"
GROUP_ORDER = (TENSOR, MATH, LOAD, STORE, TMA, SYNC, INTEGER, MOVE, CONTROL, OTHER)

# Group, first parts of opcodes ("LDG" of "LDG.E.128"), what they do.
_OPCODES = (
    (MATH, "FFMA", "fp32 fused multiply-add: a * b + c, one rounding"),
    (MATH, "FADD FMUL", "fp32 add or multiply"),
    (MATH, "HFMA2", "two 16-bit multiply-adds; with -RZ, RZ operands a way to write a constant"),
    (MATH, "HADD2 HMUL2", "two 16-bit adds or multiplies"),
    (MATH, "FSEL FMNMX", "choose one of two floats: by a predicate, or the smaller or larger"),
    (MATH, "MUFU", "special function: reciprocal, square root, exp2, ..."),
    (MATH, "F2F I2F F2I", "convert between number types"),
    (MATH, "F2FP", "pack two fp32 into two 16-bit floats"),
    (
        TENSOR,
        "HGMMA",
        "wgmma: a warpgroup (128 threads) multiplies 16-bit tiles from shared memory",
    ),
    (TENSOR, "QGMMA IGMMA", "wgmma on 8-bit floats or integers"),
    (TENSOR, "HMMA", "mma.sync: one warp multiplies tiles held in registers"),
    (TENSOR, "WARPGROUP", "ARRIVE fences registers before wgmma; DEPBAR waits for wgmma groups"),
    (LOAD, "LDG", "load from global memory (L1, then L2, then DRAM)"),
    (LOAD, "LDS", "load from shared memory"),
    (LOAD, "LDSM", "ldmatrix: a warp loads 8x8 matrices from shared memory"),
    (LOAD, "LDL", "load from local memory: a spilled register or a stack array"),
    (LOAD, "LDC", "load a kernel parameter or constant"),
    (LOAD, "LD", "load through a generic pointer"),
    (LOAD, "LDGSTS", "cp.async: copy from global to shared memory past the registers"),
    (STORE, "STG", "store to global memory"),
    (STORE, "STS", "store to shared memory"),
    (STORE, "STSM", "stmatrix: a warp stores 8x8 matrices to shared memory"),
    (STORE, "STL", "store to local memory: a register spill or a stack array"),
    (STORE, "ST", "store through a generic pointer"),
    (STORE, "RED", "atomic add without reading the result"),
    (STORE, "ATOMG ATOMS", "atomic on global or shared memory"),
    (TMA, "UTMALDG", "TMA load: one thread asks for a whole tile, global to shared memory"),
    (TMA, "UTMASTG", "TMA store: a whole tile, shared to global memory"),
    (TMA, "UTMAREDG", "TMA reduction: add a tile to global memory"),
    (TMA, "UTMAPF", "TMA prefetch of a tile into L2"),
    (TMA, "UTMACCTL", "prefetch or invalidate a TMA descriptor"),
    (TMA, "UTMACMDFLUSH", "close the group of TMA stores issued so far"),
    (TMA, "UBLKCP", "bulk copy of contiguous bytes"),
    (INTEGER, "IMAD", "integer multiply-add; .MOV and .SHL forms are moves and shifts"),
    (INTEGER, "IADD3 VIADD", "add three or two integers; .X uses the carry of the low half"),
    (INTEGER, "LEA", "shift and add: base + index * size"),
    (INTEGER, "LOP3", "any logic function of three operands"),
    (INTEGER, "SHF", "shift"),
    (INTEGER, "PRMT", "pick bytes out of two registers"),
    (INTEGER, "SEL", "choose one of two integers by a predicate"),
    (INTEGER, "ISETP FSETP", "compare integers or floats into a predicate"),
    (INTEGER, "PLOP3", "logic on predicates; with constants, sets one to true or false"),
    (MOVE, "MOV", "copy a register or constant"),
    (MOVE, "CS2R", "read a special register; from SRZ, write 64 zero bits"),
    (MOVE, "S2R S2UR", "read a special register: thread or block index, ..."),
    (MOVE, "R2UR", "register to uniform register (the warp must agree)"),
    (MOVE, "SHFL", "exchange a register between threads of a warp"),
    (MOVE, "P2R R2P", "predicates to register, or back"),
    (CONTROL, "BRA", "branch"),
    (CONTROL, "EXIT", "end of this thread"),
    (CONTROL, "BSSY BSYNC", "name the point where diverged threads meet again; wait there"),
    (CONTROL, "CALL RET", "call a function; return"),
    (CONTROL, "NOP", "nothing; fills the last 128 bytes"),
    (CONTROL, "ELECT", "elect one thread of the warp"),
    (CONTROL, "VOTEU", "which threads of the warp are here"),
    (SYNC, "WARPSYNC", "the threads of a warp meet"),
    (SYNC, "NANOSLEEP", "sleep for a moment"),
    (SYNC, "BAR", "barrier among the threads of a CTA"),
    (SYNC, "SYNCS", "mbarrier: initialise, arrive, or (PHASECHK) ask whether a phase is over"),
    (SYNC, "FENCE", "make ordinary shared-memory writes visible to TMA and wgmma, or back"),
    (SYNC, "MEMBAR", "memory fence; .GPU is far dearer than .CTA"),
    (SYNC, "ERRBAR CCTL", "part of a memory fence"),
    (SYNC, "DEPBAR LDGDEPBAR", "wait for earlier loads; close a group of cp.async copies"),
    (SYNC, "UTMACMDWAIT", "wait for TMA stores"),
    (SYNC, "UCGABAR_ARV UCGABAR_WAIT", "arrive at the cluster barrier; wait there"),
    (SYNC, "ACQBULK", "griddepcontrol.wait: wait for the kernel before"),
    (SYNC, "PREEXIT", "griddepcontrol.launch_dependents: let the next kernel start"),
    (OTHER, "USETMAXREG", "setmaxnreg: give registers back to the CTA, or take more"),
)
_KNOWN = {root: (group, words) for group, roots, words in _OPCODES for root in roots.split()}


def _lookup(root: str) -> tuple[str, str]:
    if root not in _KNOWN and root[1:] in _KNOWN and root.startswith("U"):
        group, words = _KNOWN[root[1:]]
        return group, f"{words}; on the uniform datapath (once a warp)"
    return _KNOWN.get(root, (OTHER, ""))


def group_of(step: Step) -> str:
    """The group an instruction is counted under; unknown opcodes are "other"."""
    is_move = step.opcode.startswith(("IMAD.MOV", "HFMA2.MMA"))
    return MOVE if is_move else _lookup(step.root)[0]


def words_of(root: str) -> str:
    """What the opcode does, or an empty text for one we do not know."""
    return _lookup(root)[1]
