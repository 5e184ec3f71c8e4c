import dataclasses
import errno
import io
import json
import os
import re
import sys
from unittest import mock

import bench_testing
import rich.console
import tensorflow as tf
from absl.testing import parameterized
from bench_testing import TF_HIERARCHICAL, forgets_the_last_device, measurement_of
from cli_testing import CommandTestCase, Finished, check_refused, run_tfcdo

import tfcdo
from tfcdo.bench import measure, results
from tfcdo.cli import bench as bench_cli

setUpModule, tearDownModule = bench_testing.set_up, bench_testing.tear_down


def _bench(*arguments: str) -> Finished:
    return run_tfcdo("bench", "-n", "1", "-w", "0", *arguments)


def _shown(width: int, *measured: results.Measurement) -> list[str]:
    output = io.StringIO()
    bench_cli._show("a title", measured, rich.console.Console(file=output, width=width))
    return output.getvalue().rstrip().splitlines()


class ReportTest(tf.test.TestCase):
    def test_the_table_fits(self):
        names = ("tf.CollectiveAllReduce", TF_HIERARCHICAL)
        large = [dataclasses.replace(measurement_of(n, "tf", 0.2), size=437928960) for n in names]
        lines = _shown(80, *large)
        self.assertNotIn("…", "".join(lines))
        self.assertIn("a title", lines[0])
        self.assertLessEqual(max(map(len, lines)), 80)
        self.assertIn("…", "".join(_shown(30, *large)))  # It marks numbers that are cut.

    def test_ratios_to_what_is_lost_in_its_spread_are_not_shown(self):
        reference = measurement_of("tf.X", "tf", 2e-3)
        ours = measurement_of("tfcdo.X", "tfcdo", 1e-3)
        for spread, own, shown in ((1e-3, 0.0, "0.50"), (3e-3, 0.0, "-"), (0.0, 2e-3, "-")):
            measured = dataclasses.replace(ours, spread=own)
            lines = _shown(160, measured, dataclasses.replace(reference, spread=spread))
            (row,) = (line for line in lines if "tfcdo.X" in line)
            self.assertEqual(row.split()[-2:], [shown, "1.00"])


class CommandTest(tf.test.TestCase, CommandTestCase):
    def test_a_sweep(self):
        json_file = self.folder / "out.json"
        cast = "tfcdo.HierarchicalCopyAllReduce(wire_dtype='bfloat16')"
        output = self.output_of(
            *("bench", "-n", "1", "-w", "0", "-b", "1", "-e", "16", "-f", "2", "-g", "2"),
            *("-d", "double", "--ops", cast, "--ops", "tf.ReductionToOneDevice"),
            *("--json", str(json_file)),
        )
        for shown in ("2 virtual CPU devices", "algbw", "busbw", "#wrong", "first call"):
            self.assertIn(shown, output)
        titles = [f"{8 * n} bytes, {n} elements of float64, sum" for n in (1, 2)]
        self.assertEqual(re.findall(r"^ *(\d+ bytes, .*?) *$", output, re.MULTILINE), titles)
        written = json.loads(json_file.read_text())
        self.assertEqual(written["versions"]["tensorflow"], tf.__version__)
        self.assertEqual(written["devices"], "2 virtual CPU devices")
        sizes = [(one["size"], one["sent_size"]) for one in written["results"]]
        self.assertEqual(sizes, [(8, 2), (8, None), (8, None), (16, 4), (16, None), (16, None)])
        for one in written["results"]:
            if one["busbw"] is not None and one["sent_size"] is None:
                self.assertAllClose(one["size"] / one["seconds"], one["busbw"])
        self.assertEqual({one["wrong"] for one in written["results"]}, {0, None})

    def test_is_of_this_machine_alone(self):
        with mock.patch.dict(os.environ, TF_CONFIG="{", KERAS_BACKEND="jax"):
            result = _bench("-b", "8", "-e", "8", "-g", "2", "--ops", "tf.ReductionToOneDevice()")
            found = os.environ["KERAS_BACKEND"], os.environ["KERAS_HOME"]
        self.assertEqual(found, ("tensorflow", os.devnull))
        self.assertEqual(result.status, 0, result.errors)

    def test_a_wrong_result(self):
        with mock.patch.object(tfcdo, "wrong", forgets_the_last_device, create=True):
            # Only tfcdo's errors fail, and one of them is enough.
            for ours, expected in (("tfcdo.ReductionToOneDevice", 0), ("tfcdo.wrong()", 1)):
                names = ("--ops", ours, "--ops", TF_HIERARCHICAL)
                status, output, _ = _bench("-b", "4K", "-e", "4K", "-g", "3", *names)
                self.assertEqual(status, expected, output)
                row, *_ = [line for line in output.splitlines() if "tf.HierarchicalCopy(1)" in line]
                self.assertGreater(int(row.split()[-3]), 0)

    @parameterized.parameters(
        (("-f", "1"), "--stepfactor"),
        (("-n", "99999999999999999999"), "--iters"),
        (("-d", "float8"), "float8"),
        (("-b", "1K", "-e", "8"), "--minbytes must be at most --maxbytes; got 1024 and 8 bytes"),
        (("--model", "vgg"), "'vgg' is not one of 'resnet50', "),
        (("--json", "out.txt"), "does not end in .json"),
        (("workers", "1"), "a number from 2 to 16; got '1'; see tfcdo bench workers --help"),
        (("workers", "2", "--rate", "fast"), "'fast' is not a bandwidth"),
        (("workers", "2", "--rate", "0.1"), "from 1mbit to 80gbit; got '0.1'"),
        (("workers", "2", "--rate", "100gbit"), "from 1mbit to 80gbit; got '100gbit'"),
        (("--workers", "2", "-g", "1", "--rate", "1gbit"), "; see tfcdo bench --help"),
        (("workers", "2", "-b", "8"), "No such option"),
        (("-n", "2", "workers", "2"), "--iters must follow the subcommand workers"),
        (("--model", "tiny", "-b", "8"), "--minbytes cannot be given with --model"),
        (("--optimizer", "adam", "-b", "8"), "--minbytes cannot be given with --optimizer"),
    )
    def test_a_wrong_option_is_found_before_tensorflow_starts(self, arguments, named):
        with mock.patch.dict(sys.modules, tensorflow=None):
            self.assert_refused(re.escape(named), "bench", *arguments)

    @parameterized.parameters(
        ("ring", "ring: NameError: name 'ring' is not defined; write all, tfcdo, tf, "),
        ("tf.X(", "tf.X(: SyntaxError: '(' was never closed"),
        ("tf.ReduceOp.SUM", "makes no cross-device ops"),
        ("tfcdo.HierarchicalCopyAllReduce(num_packs=-1)", "num_packs"),
        ("tf.CollectiveAllReduce(foo=1)", "no attribute 'CollectiveAllReduce'"),
        ("tf.NcclAllReduce", "none of the implementations can run here"),
        ("tf.CrossDeviceOps", "tf.CrossDeviceOps: batch_reduce_implementation method must be imp"),
        # An argument that tfcdo's own check names when it is used, and two without a check.
        ("tfcdo.ReductionToOneDevice(reduce_to_device='CPU:99')", ": reduce_to_device must name a"),
        ("tf.ReductionToOneDevice(reduce_to_device='x')", "'x'): Unknown attribute 'x'"),
        ("tf.ReductionToOneDevice(None, 5)", "(None, 5): 'int' object is not callable"),
    )
    def test_a_wrong_implementation(self, name: str, named: str):
        check_refused(_bench("--ops", name)._replace(output=""), re.escape(named))

    def test_more_than_the_memory_holds(self):
        result = _bench("-b", "99999G", "-e", "99999G", "-g", "2", "--ops", "tfcdo.AutoAllReduce")
        self.assertRegex(result.errors, "\ntfcdo: out of memory: Unable to allocate .*\n$")

    def test_devices_are_chosen_before_anything_is_constructed(self):
        # As in a process where what was constructed has started TensorFlow with one device.
        error = RuntimeError("TensorFlow has already started with 1")
        with (
            mock.patch("tfcdo.bench.devices.choose_devices", side_effect=error),
            mock.patch.object(measure, "parse") as parse,
        ):
            status, _, errors = _bench("-b", "64", "-e", "64", "-g", "2")
        self.assertEqual((status, errors), (1, f"tfcdo: {error}\n"))
        parse.assert_not_called()

    def test_a_file_that_cannot_be_written_gets_one_line_after_the_results(self):
        path = self.folder / "out.json"
        path.symlink_to(self.folder / "missing" / "out.json")
        status, output, errors = _bench(
            *("-b", "64", "-e", "64", "-g", "2", "--json", str(path)),
            *("--ops", "tf.NcclAllReduce()  # [/x]"),
            *("--ops", "tfcdo.ReductionToOneDevice()  # [bold]"),
        )
        self.assertEqual(status, 1)
        self.assertIn("Without tf.NcclAllReduce()  # [/x]: ", output)
        self.assertIn("tfcdo.ReductionToOneDevice()  # [bold] ", output)
        # What was logged comes before it, if this process logs to standard error.
        self.assertEndsWith(errors, f"tfcdo: {path}: {os.strerror(errno.ENOENT)}\n")
        self.assertNotIn("Traceback", errors)


if __name__ == "__main__":
    tf.test.main()
