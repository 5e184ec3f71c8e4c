"""Builds the wheel and the sdist: `python pip_package/build_wheel.py --output dist`.

It builds from a copy that holds just what belongs in them, so that neither leftovers of an
earlier build nor anything else that lies in the checkout gets in, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Not resolve(): Bazel lays the files out as links, and only the layout has all of them.
_PROJECT = Path(__file__).absolute().parents[1]
_METADATA = ("LICENSE", "README.md", "pyproject.toml")


def build(output: Path) -> tuple[Path, Path]:
    """Builds the wheel and the sdist with the setuptools of the running Python.

    Args:
      output: The folder for them; made if it is not there. Wheels of other versions are removed.

    Returns:
      The paths of the wheel and of the sdist.

    Raises:
      subprocess.CalledProcessError: If the build fails; its log is on standard error.
    """
    output.mkdir(parents=True, exist_ok=True)
    for stale in (*output.glob("tfcdo-*.whl"), *output.glob("tfcdo-*.tar.gz")):
        stale.unlink()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        for name in _METADATA:
            shutil.copy(_PROJECT / name, source)
        shutil.copytree(
            _PROJECT / "tfcdo", source / "tfcdo", ignore=shutil.ignore_patterns("__pycache__")
        )
        command = [sys.executable, "-m", "build", "--wheel", "--sdist", "--no-isolation"]
        log = subprocess.run(
            [*command, "--outdir", str(output.absolute()), str(source)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if log.returncode != 0:
        sys.stderr.write(log.stdout)
        log.check_returncode()
    (wheel,) = output.glob("tfcdo-*.whl")
    (sdist,) = output.glob("tfcdo-*.tar.gz")
    return wheel, sdist


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Builds tfcdo's wheel and sdist.")
    parser.add_argument("--output", type=Path, default=Path("dist"), metavar="FOLDER")
    print(*build(parser.parse_args().output), sep="\n")


if __name__ == "__main__":
    main()
