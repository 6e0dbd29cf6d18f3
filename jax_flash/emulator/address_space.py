"""Windows of the generic address space; PTX ISA, "Generic Addressing"."""

PARAMETER_WINDOW = 1 << 60
"""Generic address of the parameter space's first byte."""

SHARED_WINDOW = 1 << 61
"""Generic address of shared memory's offset 0."""

SHARED_BASE = 1024
"""First offset of a block's shared memory: hardware keeps the first KiB for itself."""
