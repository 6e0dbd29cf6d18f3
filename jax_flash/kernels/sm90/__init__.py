"""Kernels for Hopper (``sm_90a``): TMA loads, warpgroup matmuls, warp specialisation."""
