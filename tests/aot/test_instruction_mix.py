"""Machine instructions are counted by what they do."""

from __future__ import annotations

from jax_flash.aot.instruction_mix import CLASS_NAMES, instruction_mix

# Lines as cuobjdump prints them: instructions at addresses, each followed by its encoding.
SASS = """
	code for sm_90a
		Function : jax_flash_forward
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
                                                                       /* 0x000e620000000800 */
        /*0010*/              @!P0 FFMA.FTZ R5, R4, R3, -R2 ;          /* 0x0000000004057223 */
        /*0020*/             @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;         /* 0x0000000104047890 */
        /*0030*/                   MUFU.EX2 R5, R5 ;                   /* 0x0000000500057308 */
        /*0040*/                   MUFU.EX2.F16 R5, R5 ;               /* 0x0000000500057308 */
        /*0050*/                   MUFU.RCP R5, R5 ;                   /* 0x0000000500057308 */
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R2 ;
        /*0080*/                   FMUL R3, R3, R4 ;
        /*1000*/                   STL [R1+0x4], R5 ;
        /*11f0*/                   UTMALDG.4D [UR8], [UR6], desc[UR10] ;
        /*1200*/                   BRA 0x1200;
        /*1210*/                   NOP;
"""


def test_instructions_are_counted_by_class():
    assert instruction_mix(SASS) == {
        "tensor_core": 1,
        "exp2": 2,
        "special_function": 1,
        "float": 2,
        "local_memory": 1,
        "bulk_copy": 1,
        "synchronization": 1,
        "control": 1,
        "uniform": 1,
        "other": 1,
    }


def test_nothing_has_no_instructions():
    assert instruction_mix("") == {}
    assert len(set(CLASS_NAMES)) == len(CLASS_NAMES)
