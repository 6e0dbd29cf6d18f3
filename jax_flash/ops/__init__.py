"""The JAX layer: from the arguments of a public function to kernels or their JAX equivalent.

A call passes through `validation` (every argument is checked, then normalised), `dispatch` (which
implementation, and why), `attention` (its gradient), `batching` (vmap), and either `ffi_calls` (the
kernels) or `jax_flash.reference` (plain JAX).
"""
