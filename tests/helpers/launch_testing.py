"""Shared by tests of `tfcdo launch`: it runs small scripts, none of which needs TensorFlow."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import cli_testing
import psutil
from absl.testing import parameterized

from tfcdo.launch import supervisor

# No test takes as long, unless the launcher hangs.
SECONDS = 30
PREAMBLE = """
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def mark(name): pathlib.Path(name).write_text(str(os.getpid()))
"""


class LaunchTestCase(parameterized.TestCase):
    specs: Sequence[supervisor.WorkerSpec]  # The workers that would be started.

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.script = self.folder / "train.py"
        self.addCleanup(self._end_marked)

    def start(
        self, *arguments: str, script: str, before: str = "pass", **variables: str | None
    ) -> subprocess.Popen[str]:
        """Starts `tfcdo launch` in a folder that has the script, without waiting for it."""
        self.script.write_text(PREAMBLE + textwrap.dedent(script))
        heard = "from signal import *; signal(SIGINT, SIG_DFL); signal(SIGHUP, SIG_DFL)"
        program = f"{heard}; {before}; from tfcdo.__main__ import main; main()"
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with changed_variables(**variables):
            process = subprocess.Popen(
                [sys.executable, "-c", program, "launch", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
                cwd=self.folder,
            )
        self.addCleanup(process.kill)
        return process

    def launch(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs `tfcdo launch` to its end."""
        return self.finish(self.start(*arguments, **options))

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, error = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def run_here(self, *arguments: str) -> cli_testing.Finished:
        """Runs `tfcdo launch` in this process, with an empty script."""
        self.script.touch()
        given = [str(self.script) if word == "train.py" else word for word in arguments]
        return cli_testing.run_tfcdo("launch", *given)

    def variables(
        self, *arguments: str, **own: str | None
    ) -> tuple[dict[str, Mapping[str, str]], str]:
        """Returns the variables of each worker that would be started, and what is said."""

        def run(job: supervisor.Job) -> int:
            with job.workers() as self.specs:
                return 0

        with changed_variables(**own), mock.patch.object(supervisor, "run", run):
            status, _, errors = self.run_here(*arguments, "train.py")
        self.assertEqual(status, 0, errors)
        return {spec.name: spec.environment for spec in self.specs}, errors

    def read_pid(self, name: str) -> int:
        """Returns the process that has marked itself, as soon as it has."""
        path = self.folder / name
        self.wait_until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def assert_ended(self, *names: str) -> None:
        """Asserts that processes that have marked themselves are gone, or soon are."""
        for name in names:
            pid = self.read_pid(name)
            self.wait_until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]

    def _end_marked(self) -> None:
        """Ends what a failed test has left."""
        for path in self.folder.iterdir():
            if path != self.script and path.is_file() and path.read_text().strip().isdigit():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)


@contextlib.contextmanager
def changed_variables(**changed: str | None) -> Iterator[None]:
    """Sets variables of this process; None removes one."""
    with mock.patch.dict(os.environ):
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: one for name, one in changed.items() if one is not None})
        yield


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
