"""Command line: ``python -m jax_flash.aot build|list|check``."""

import argparse
import os
import sys
from pathlib import Path

from jax_flash.aot.build import DEFAULT_DIRECTORY, build, selected_variants, up_to_date
from jax_flash.spec.arch import Arch
from jax_flash.spec.manifest import ManifestError, read_manifest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash.aot",
        description="Compile the kernels ahead of time. Needs no GPU.",
    )
    parser.add_argument(
        "command",
        choices=("build", "list", "check"),
        help="build what is missing or stale; list the kernels; check that all are up to date",
    )
    parser.add_argument("--arch", choices=[arch.value for arch in Arch], help="one target only")
    parser.add_argument("--only", metavar="NAME", help="only kernels whose name contains NAME")
    parser.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compile N kernels at a time"
    )
    parser.add_argument(
        "--directory", type=Path, default=DEFAULT_DIRECTORY, help="where cubins and manifest live"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    variants = selected_variants(options.arch, options.only)
    if not variants:
        print(f"no kernel is called like {options.only!r}", file=sys.stderr)
        return 2
    if options.command == "build":
        manifest = build(variants, options.directory, max(1, options.jobs))
        print(f"{len(manifest.cubins)} kernels in {options.directory}")
        return 0
    try:
        entries = read_manifest(options.directory).by_name()
    except ManifestError as error:
        print(error, file=sys.stderr)
        entries = {}
    stale = 0
    for variant in variants:
        entry = entries.get(variant.name)
        current = up_to_date(variant, entry, options.directory)
        stale += not current
        state = "up to date" if current else "stale" if entry else "not built"
        details = ""
        if entry is not None:
            tile = ", ".join(f"{key}={value}" for key, value in entry.tile.items())
            memory = f"{entry.shared_memory_bytes} B shared memory"
            details = f"  {entry.registers} registers, {memory}, {tile}"
        if options.command == "list" or not current:
            print(f"{variant.name:50} {state:10}{details}")
    if options.command == "check" and stale:
        print(f"{stale} of {len(variants)} kernels need `python -m jax_flash.aot build`")
    return 1 if options.command == "check" and stale else 0


if __name__ == "__main__":
    sys.exit(main())
