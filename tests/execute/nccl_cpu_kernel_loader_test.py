"""The CPU kernel for NcclAllReduce is built once, and loaded."""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile
import threading
from concurrent import futures
from unittest import mock

import nccl_cpu_kernel
import nccl_cpu_kernel_testing
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized


def setUpModule() -> None:
    nccl_cpu_kernel_testing.load_kernel()


class LoaderTest(parameterized.TestCase):
    """Building the kernel, with a script in the compiler's place."""

    def directory(self) -> pathlib.Path:
        return pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def fake_compiler(self, body: str) -> pathlib.Path:
        """Installs a shell script, which finds the path it has to write to in $out."""
        script = self.directory() / "compiler"
        script.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --version ]; then echo fake; exit; fi\n'
            'for argument in "$@"; do out=$argument; done\n'
            f"{body}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.enter_context(mock.patch.dict(os.environ, {"CXX": str(script)}))
        return script

    def test_loads_once(self):
        with futures.ThreadPoolExecutor(8) as pool:
            libraries = list(pool.map(lambda _: nccl_cpu_kernel.load(), range(8)))
        self.assertLen(set(libraries), 1)
        self.assertTrue(libraries[0].is_file())

    def test_no_compiler(self):
        with mock.patch.dict(os.environ, {"CXX": "/no/such/compiler"}):
            self.assertRegex(str(nccl_cpu_kernel.why_unavailable()), "install g\\+\\+")
            with self.assertRaisesRegex(RuntimeError, "install g\\+\\+"):
                nccl_cpu_kernel.build(self.directory())

    def test_a_compiler_that_fails(self):
        self.fake_compiler("echo half >$out; echo 'no such header' >&2; exit 3")
        directory = self.directory()
        with self.assertRaisesRegex(RuntimeError, r"exit status 3(.|\n)*no such header"):
            nccl_cpu_kernel.build(directory)
        self.assertEmpty(list(directory.iterdir()))

    def test_builds_at_the_same_time(self):
        # The file is written in two pieces: nobody may see the first piece alone.
        script = self.fake_compiler(
            'echo . >>"${0%/*}/runs"; printf a >$out; sleep 0.2; printf b >>$out'
        )
        directory = self.directory()
        start = threading.Barrier(4)

        def build(_: int) -> str:
            start.wait()
            return nccl_cpu_kernel.build(directory).read_text()

        with futures.ThreadPoolExecutor(4) as pool:
            self.assertEqual(4 * ["ab"], list(pool.map(build, range(4))))
        self.assertLen(list(directory.iterdir()), 1)
        self.assertEqual(script.with_name("runs").read_text(), ".\n")

    def test_a_kept_library_needs_no_writable_directory(self):
        cache = self.directory()
        (cache / "tfcdo").mkdir()
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
            kept = cache / "tfcdo" / nccl_cpu_kernel._library_name()
            kept.touch()
            with (
                mock.patch.object(nccl_cpu_kernel, "_loaded_library", None),
                mock.patch.object(nccl_cpu_kernel, "_cache_directory") as writable,
                mock.patch.object(tf, "load_op_library") as load,
            ):
                self.assertEqual(kept, nccl_cpu_kernel.load())
        writable.assert_not_called()
        load.assert_called_once_with(str(kept))

    def test_builds_again_only_if_something_changed(self):
        runs = self.fake_compiler('echo . >>"${0%/*}/runs"; : >$out').with_name("runs")
        directory = self.directory()
        first = nccl_cpu_kernel.build(directory)
        self.assertEqual(first, nccl_cpu_kernel.build(directory))
        self.assertEqual(runs.read_text(), ".\n")
        changed = self.directory() / "changed.cc"
        changed.write_text("// Another source.")
        with mock.patch.object(nccl_cpu_kernel, "_SOURCE", changed):
            self.assertNotEqual(first, nccl_cpu_kernel.build(directory))
        with mock.patch.object(tf.version, "VERSION", "0.0"):
            self.assertNotEqual(first, nccl_cpu_kernel.build(directory))
        with mock.patch.object(nccl_cpu_kernel, "_OWN_FLAGS", ("-O3",)):
            self.assertNotEqual(first, nccl_cpu_kernel.build(directory))

    def test_a_cache_that_is_not_writable(self):
        not_a_directory = self.directory() / "file"
        not_a_directory.touch()
        with (
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(not_a_directory)}),
            self.assertLogs(level="WARNING") as logs,
        ):
            directory = nccl_cpu_kernel._cache_directory()
        self.assertTrue(directory.is_dir())
        self.assertLen(logs.output, 1)
        self.assertIn("Set XDG_CACHE_HOME", logs.output[0])


if __name__ == "__main__":
    absltest.main()
