"""Writes python_sources.bzl: run it after adding, moving or removing a file of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    sources = sorted(path.relative_to(ROOT) for path in ROOT.glob("jax_flash/**/*.py"))
    lines = [f'    "{source.as_posix()}",' for source in sources]
    text = "\n".join(
        ['"""Every Python source of the package."""', "", "PYTHON_SOURCES = [", *lines, "]", ""]
    )
    Path(__file__).with_name("python_sources.bzl").write_text(text)


if __name__ == "__main__":
    main()
