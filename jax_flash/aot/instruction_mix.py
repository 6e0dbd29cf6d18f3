"""Counts the machine instructions of a kernel by what they do."""

import re
from collections import Counter

# "/*0050*/  @!P0 MUFU.EX2 R5, R4 ;" with an optional predicate, which may be a uniform one.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)", re.M)

_CLASSES: dict[str, frozenset[str]] = {
    name: frozenset(opcodes.split())
    for name, opcodes in {
        "tensor_core": "HGMMA IGMMA QGMMA BGMMA HMMA IMMA DMMA",
        "exp2": "MUFU.EX2",
        "special_function": "MUFU",
        "float": "FFMA FMUL FADD FMNMX FSEL FSETP FSET FCHK FSWZADD HFMA2 HADD2 HMUL2 HMNMX2 HSETP2"
        " HSET2 DFMA DMUL DADD DSETP",
        "conversion": "F2F F2FP F2I F2IP I2F I2FP FRND I2I",
        "shared_memory": "LDS STS LDSM STSM ATOMS",
        "global_memory": "LDG STG LD ST ATOM ATOMG RED REDG LDGSTS",
        "local_memory": "LDL STL",
        "bulk_copy": "UTMALDG UTMASTG UTMAREDG UTMAPF UBLKCP UBLKRED UBLKPF UTMACCTL UTMACMDFLUSH",
        "synchronization": "BAR SYNCS WARPSYNC WARPGROUP DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR"
        " CGAERRBAR UCGABAR_ARV UCGABAR_WAIT NANOSLEEP ACQBULK PREEXIT",
        "exchange": "SHFL VOTE VOTEU REDUX MATCH ELECT",
        "control": "BRA BRX BRXU JMP BSSY BSYNC BREAK BMOV CALL RET EXIT KILL YIELD",
        "integer": "IMAD IADD3 IADD IABS IMNMX VIADD VIADDMNMX VIMNMX VABSDIFF ISETP LEA LOP3 SHF"
        " SHL SHR PRMT SGXT BMSK POPC FLO SEL MOV IDP I2IP PLOP3 P2R R2P CS2R S2R",
        "uniform": "UIADD3 UIMAD UISETP ULEA ULOP3 UMOV USHF USEL UPRMT USGXT UBMSK UPOPC UFLO"
        " UPLOP3 UP2UR UR2UP R2UR S2UR ULDC USETMAXREG",
    }.items()
}
_CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes}

OTHER = "other"
CLASS_NAMES = (*_CLASSES, OTHER)
"""Every class that a count may be of."""

_PADDING = "NOP"


def instruction_mix(sass: str) -> dict[str, int]:
    """Returns how many instructions of each class a disassembly has.

    A loop's instructions count once: this is what the kernel consists of, not what it executes.

    Args:
        sass: what ``cuobjdump --dump-sass`` prints.

    Returns:
        Counts by name of ``CLASS_NAMES``; classes without instructions, and padding, are left out.
    """
    opcodes = Counter(_INSTRUCTION.findall(sass))
    mix: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        base, _, rest = opcode.partition(".")
        if base != _PADDING:
            # A class may name one variant of an operation: MUFU.EX2.
            variant = f"{base}.{rest.split('.')[0]}"
            mix[_CLASS_OF.get(variant, _CLASS_OF.get(base, OTHER))] += count
    return {name: mix[name] for name in CLASS_NAMES if mix[name]}
