"""Runs the fast tests on each TensorFlow and Python that has wheels: `make test-versions`.

Some of them: `nox -s "fast_tests(tensorflow='2.18.1', python='3.12', keras='')" ...`. Each has an
environment of its own (2 GB, of which 600 MB are downloaded), which is removed when its tests have
passed. What was run is kept in tfcdo/tested_versions.json, from which docs/versions.md is made. A
Python that is not on this machine, and that uv cannot download, is skipped, and so not in the
record.
"""

from __future__ import annotations

import pathlib
import shutil

import nox

# uv takes seconds for what takes pip a minute.
nox.options.default_venv_backend = "uv|virtualenv"

# The newest of each minor version that has wheels, and the Pythons that it has them for.
PYTHONS = {
    "2.16.2": ("3.10", "3.11", "3.12"),
    "2.17.1": ("3.10", "3.11", "3.12"),
    "2.18.1": ("3.10", "3.11", "3.12"),
    "2.19.1": ("3.10", "3.11", "3.12"),
    "2.20.0": ("3.10", "3.11", "3.12", "3.13"),
    "2.21.0": ("3.10", "3.11", "3.12", "3.13"),
}


# An older Keras than the newest, whose metrics TensorFlow's strategies add up twice.
KERAS = {("2.18.1", "3.11"): "3.8.0"}
NEWEST = [(version, python, "") for version, pythons in PYTHONS.items() for python in pythons]


@nox.session
@nox.parametrize(
    ("tensorflow", "python", "keras"),
    [*NEWEST, *((*versions, keras) for versions, keras in KERAS.items())],
)
def fast_tests(session: nox.Session, tensorflow: str, keras: str) -> None:
    """Runs tests/fast_tests.txt on some versions and adds the result to the record.

    Args:
      session: the environment.
      tensorflow: TensorFlow's version.
      keras: Keras's version; empty for the newest.
    """
    versions = [f"tensorflow=={tensorflow}", f"keras=={keras}" if keras else "keras"]
    session.install(*versions, "--editable", ".[test]")
    # Not in `session.create_tmp()`: that becomes TMPDIR, too long a path for a socket of the tests.
    report = pathlib.Path(session.virtualenv.location).absolute() / "junit.xml"
    tests = ["python", "-m", "pytest", "-q", "-n", "2", "@tests/fast_tests.txt"]
    # 1: tests have failed, which the record is to say.
    session.run(
        *tests,
        f"--junitxml={report}",
        env={
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_ENABLE_ONEDNN_OPTS": "0",  # As in `make test`.
            "CUDA_VISIBLE_DEVICES": "",
        },
        success_codes=[0, 1],
    )
    # None: `nox --install-only` runs nothing. If a test failed, this raises: the environment stays.
    if session.run("python", "tools/tested_versions.py", str(report)) is not None:
        shutil.rmtree(session.virtualenv.location)
