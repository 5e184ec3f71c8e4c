"""Installs a wheel in an empty environment and uses it: `python pip_package/check_wheel.py WHEEL`.

With `--sdist SDIST` it also builds a wheel from that sdist, which must be the same wheel. With
`--borrow-dependencies` the environment is empty but for what the running Python already has (tfcdo
itself excepted): no download, a few seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

# What a new user would type.
SCRIPT = """\
import tensorflow as tf
import tfcdo
strategy = tf.distribute.MirroredStrategy(tfcdo.configure_virtual_cpus(3), cross_device_ops=tfcdo.HierarchicalCopyAllReduce())
values = strategy.experimental_distribute_values_from_function(lambda context: tf.constant(context.replica_id_in_sync_group + 1.0))
(total,) = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, [(values, values)])
print(*(component.numpy() for component in strategy.experimental_local_results(total)))
"""  # noqa: E501
EXPECTED = "6.0 6.0 6.0"

# Where the package came from, and what it says of itself.
_REPORT = """\
import importlib.metadata, tfcdo
print(tfcdo.__file__)
print(tfcdo.__version__, importlib.metadata.version("tfcdo"))
"""


class WheelError(Exception):
    """The wheel, or the sdist's wheel, is not what it should be."""


def check_wheel(wheel: Path, environment: Path, borrow_dependencies: bool = False) -> str:
    """Installs `wheel` in a new virtual environment and runs `SCRIPT` there.

    Args:
      wheel: The wheel's path.
      environment: The folder of the new environment.
      borrow_dependencies: Whether tfcdo's dependencies are the running Python's instead of
        being downloaded and installed.

    Returns:
      What `SCRIPT` printed.

    Raises:
      WheelError: If tfcdo is not imported from the new environment, its versions differ, or
        `SCRIPT` prints something else than `EXPECTED`.
      subprocess.CalledProcessError: If installing or a script fails.
    """
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    if borrow_dependencies:
        # A folder named in a .pth file comes after the environment's own, and the .pth files in it
        # are not read: an editable tfcdo there stays out of sight.
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index"] if borrow_dependencies else []
    # What is never imported need not be compiled.
    subprocess.run([*pip, "install", "--quiet", "--no-compile", *options, str(wheel)], check=True)
    imported_from, versions = _run(python, _REPORT).splitlines()
    if not Path(imported_from).is_relative_to(packages):
        raise WheelError(f"tfcdo was imported from {imported_from}, not from {packages}")
    if len(set(versions.split())) != 1:
        raise WheelError(f"tfcdo.__version__ and the wheel's metadata differ: {versions}")
    printed = _run(python, SCRIPT).strip()
    if printed != EXPECTED:
        raise WheelError(f"the script printed {printed!r} instead of {EXPECTED!r}")
    return printed


def check_sdist(sdist: Path, wheel: Path, folder: Path) -> int:
    """Builds a wheel from an sdist and compares it with the one that was built beside it.

    Args:
      sdist: The sdist's path.
      wheel: The path of the wheel that it should give.
      folder: An empty folder to build in.

    Returns:
      The number of files in the wheels.

    Raises:
      WheelError: If a file of one is missing in the other or differs.
      subprocess.CalledProcessError: If the build fails.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(source)], check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    contents, expected = _contents(built), _contents(wheel)
    if contents != expected:
        names = {name for name, _ in contents.items() ^ expected.items()}
        raise WheelError(f"the sdist gives another wheel: {', '.join(sorted(names))}")
    return len(contents)


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _run(python: Path, script: str) -> str:
    """Runs a script in the new environment alone: from another folder, without PYTHONPATH."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(python), "-c", script],
        cwd=python.parent,
        env=surroundings,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        sys.stderr.write(result.stderr)
        result.check_returncode()
    return result.stdout


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Installs and uses tfcdo's wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--borrow-dependencies", action="store_true")
    parser.add_argument("--sdist", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        printed = check_wheel(
            arguments.wheel, Path(folder) / "environment", arguments.borrow_dependencies
        )
    print(f"{arguments.wheel} in an empty environment: {printed}")
    if arguments.sdist:
        with tempfile.TemporaryDirectory() as folder:
            count = check_sdist(arguments.sdist, arguments.wheel, Path(folder))
        print(f"{arguments.sdist} gives the same wheel, {count} files")


if __name__ == "__main__":
    main()
