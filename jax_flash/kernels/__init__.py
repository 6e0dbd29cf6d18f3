"""Device code: FlashAttention kernels in CuTe-DSL. Needs ``cutlass``; not imported at run time."""
