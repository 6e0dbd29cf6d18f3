"""Builds cubins and their manifest: in parallel, only what changed, replaced atomically."""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from jax_flash.aot.inspect_cubin import inspect_cubin
from jax_flash.aot.toolchain import source_hash, toolchain
from jax_flash.spec.arch import Arch
from jax_flash.spec.kernel_args import ABI_VERSION, kernel_arguments
from jax_flash.spec.launch_plan import launch_plan
from jax_flash.spec.manifest import (
    CubinEntry,
    Manifest,
    ManifestError,
    check_cubin,
    read_manifest,
    write_manifest,
)
from jax_flash.spec.support import variants_to_build
from jax_flash.spec.variant import (
    KernelRole,
    KernelVariant,
    backward_bias_tile_of,
    backward_tile_of,
    forward_tile_of,
)

DEFAULT_DIRECTORY = Path(__file__).resolve().parents[1] / "cubins"


def up_to_date(variant: KernelVariant, entry: CubinEntry | None, directory: Path) -> bool:
    """Returns whether ``entry`` is what a build of ``variant`` would give again."""
    if entry is None or entry.source_hash != source_hash(variant):
        return False
    try:
        check_cubin(entry, directory)
    except ManifestError:
        return False
    return (directory / entry.file).with_suffix(".ptx").is_file()


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def build_one(variant: KernelVariant, directory: Path) -> CubinEntry:
    """Compiles one variant into ``directory`` and returns its manifest entry.

    Runs in a worker process that :func:`_start_worker` has prepared.

    Raises:
      ValueError: the kernel spills registers, or a parameter list disagrees with the spec.
    """
    from jax_flash.aot.compile import compile_variant

    compiled = compile_variant(variant)
    path = directory / f"{variant.name}.cubin"
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, compiled.cubin)
    _replace(path.with_suffix(".ptx"), compiled.ptx.encode())
    resources = inspect_cubin(path)
    if resources.symbol != compiled.symbol:
        raise ValueError(
            f"{variant.name}: the cubin holds {resources.symbol}, the PTX {compiled.symbol}"
        )
    if resources.spill_bytes:
        raise ValueError(
            f"{variant.name} spills {resources.spill_bytes} bytes a thread to local memory; "
            "its tile needs more registers than a thread has"
        )
    if resources.matmuls_serialised:
        raise ValueError(
            f"{variant.name}: the compiler serialises its matmuls. Run ptxas on "
            f"{path.with_suffix('.ptx')} to see why (usually too many registers)"
        )
    plan = launch_plan(variant)
    tile_of = {
        KernelRole.FORWARD: forward_tile_of,
        KernelRole.BACKWARD_BIAS: backward_bias_tile_of,
    }.get(variant.role, backward_tile_of)
    return CubinEntry(
        name=variant.name,
        file=f"{variant.name}.cubin",
        symbol=resources.symbol,
        sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        arguments=tuple(argument.as_row() for argument in kernel_arguments(variant)),
        grid=tuple((factor.value, factor.divisor) for factor in plan.grid),
        threads=plan.threads,
        cluster=plan.cluster,
        programmatic_launch=plan.programmatic_launch,
        resident_up_to=plan.resident_up_to,
        shared_memory_bytes=plan.shared_memory_bytes,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        tile=asdict(tile_of(variant)),
        toolchain=toolchain(),
        source_hash=source_hash(variant),
        instructions=resources.instructions,
    )


def _with_instructions(entry: CubinEntry, directory: Path) -> CubinEntry:
    """Returns an entry with its instructions counted, if an older build did not count them."""
    path = directory / entry.file
    if entry.instructions or not path.is_file():
        return entry
    return replace(entry, instructions=inspect_cubin(path).instructions)


def selected_variants(arch: str | None, only: str | None) -> tuple[KernelVariant, ...]:
    """Returns the variants of a target whose name contains ``only``."""
    variants = variants_to_build(None if arch is None else Arch(arch))
    return tuple(variant for variant in variants if only is None or only in variant.name)


def build(variants: Sequence[KernelVariant], directory: Path, jobs: int) -> Manifest:
    """Brings the cubins of ``variants`` in ``directory`` up to date and writes the manifest.

    Entries of other variants stay as they are, unless no build makes them any more.

    Raises:
      ValueError, RuntimeError: a kernel did not compile; nothing of it enters the manifest.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        entries = read_manifest(directory).by_name()
    except ManifestError:
        entries = {}
    known = {variant.name for variant in variants_to_build()}
    entries = {name: entry for name, entry in entries.items() if name in known}
    stale = [v for v in variants if not up_to_date(v, entries.get(v.name), directory)]
    rebuilt = {variant.name for variant in stale}
    entries = {
        name: entry if name in rebuilt else _with_instructions(entry, directory)
        for name, entry in entries.items()
    }
    for entry in _build_all(stale, directory, jobs):
        entries[entry.name] = entry
        _write(entries, directory)
    return _write(entries, directory)


def _write(entries: dict[str, CubinEntry], directory: Path) -> Manifest:
    cubins = tuple(entries[name] for name in sorted(entries))
    manifest = Manifest(abi_version=ABI_VERSION, cubins=cubins)
    write_manifest(manifest, directory)
    return manifest


def _start_worker(arch: str, scratch: str) -> None:
    """Prepares a fresh process; the DSL reads these settings once, when it is imported.

    The DSL passes PTX and cubin through files named after the Python class: two kernels of one
    class compiled at a time in one folder would read each other's.
    """
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(dir=scratch)


def _build_all(
    variants: Sequence[KernelVariant], directory: Path, jobs: int
) -> Iterator[CubinEntry]:
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=len(variants), desc="kernels", unit="kernel") as progress,
    ):
        for arch in Arch:
            of_arch = [variant for variant in variants if variant.arch is arch]
            if not of_arch:
                continue
            with ProcessPoolExecutor(
                max_workers=min(jobs, len(of_arch)),
                mp_context=get_context("spawn"),
                initializer=_start_worker,
                initargs=(arch.value, scratch),
            ) as pool:
                pending = [pool.submit(build_one, variant, directory) for variant in of_arch]
                for future in as_completed(pending):
                    yield future.result()
                    progress.update()
