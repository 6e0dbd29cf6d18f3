"""Checks an installed wheel, run by a Python that has it and neither its sources nor a compiler.

python tests/repo/check_installed_wheel.py      # from a folder that is not the source tree
"""

import importlib.util
from importlib.metadata import files
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_flash
from jax_flash.ops.registration import REGISTRATION
from jax_flash.spec.manifest import check_cubin
from jax_flash.spec.support import variants_to_build

if __name__ == "__main__":
    assert "site-packages" in Path(jax_flash.__file__).parts, jax_flash.__file__
    assert importlib.util.find_spec("cutlass") is None, "cutlass must not be needed, nor be here"
    assert not REGISTRATION.error, REGISTRATION.error
    assert set(REGISTRATION.kernels) == {variant.name for variant in variants_to_build()}
    for entry in REGISTRATION.kernels.values():
        check_cubin(entry, REGISTRATION.directory)
    suffixes = [Path(str(file)).suffix for file in files("jax_flash") or ()]
    assert suffixes.count(".cubin") == len(REGISTRATION.kernels)
    assert ".ptx" not in suffixes

    shape = jax.ShapeDtypeStruct((2, 64, 4, 128), jnp.bfloat16)
    lowered = (
        jax.jit(lambda *qkv: jax_flash.attention(*qkv, implementation="cuda"))
        .trace(shape, shape, shape)
        .lower(lowering_platforms=("cuda",))
    )
    assert "jax_flash_forward_v1" in lowered.as_text()
    print(f"{Path(jax_flash.__file__).parent}: {len(REGISTRATION.kernels)} kernels, no cutlass")
