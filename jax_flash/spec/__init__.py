"""Facts that the build and the runtime share, in plain Python (standard library only).

What a kernel is called, which kernels exist, their tiles, arguments, grids and workspaces are
stated here once. The ahead-of-time build, the CuTe-DSL kernels, the JAX layer, the emulator and
(through the manifest) the C++ launcher all read them from here.
"""
