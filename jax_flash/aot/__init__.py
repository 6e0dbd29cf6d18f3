"""Ahead-of-time build of the kernels: needs ``cutlass`` and no GPU; never imports jax."""
