"""Device code: FlashAttention kernels in CuTe-DSL. Needs ``cutlass``; never imported at run time."""
