"""What `tfcdo bench` has in common with nccl-tests: -J, p99, averages, a time-out, --compare."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import time
from typing import Any
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized
from bench_testing import TF_HIERARCHICAL
from bench_testing import measurement_of
from bench_testing import setUpModule  # noqa: F401
from bench_testing import tearDownModule  # noqa: F401
from cli_testing import CommandTestCase
from cli_testing import Finished
from cli_testing import run_tfcdo
from rich.console import Console

from tfcdo.bench import implementations
from tfcdo.bench import measure
from tfcdo.cli import bench_compare
from tfcdo.cli import bench_report

_OURS = "tfcdo.ReductionToOneDevice"


def _bench(*arguments: str) -> Finished:
    return run_tfcdo("bench", "-g", "2", "-n", "2", "-w", "0", "-b", "64", "-e", "64", *arguments)


class CommandTest(tf.test.TestCase, CommandTestCase):
    def test_json_and_the_comparison_with_it(self):
        old, new = self.folder / "old.json", self.folder / "new.json"
        both = ("--ops", _OURS, "--ops", "tf.ReductionToOneDevice")
        status, output, _ = _bench("--ops", _OURS, "-J", str(old))
        self.assertEqual(status, 0, output)
        self.assertRegex(
            output.splitlines()[-1], rf"^# Avg bus bandwidth    : \S+ \({_OURS}\)$|^# Out of bounds"
        )
        written = json.loads(old.read_text())
        (one,) = [row for row in written["results"] if row["name"] == _OURS]
        self.assertGreaterEqual(one["p99"], one["seconds"])
        if one["seconds"] > 0:
            self.assertAllClose(64 / one["seconds"], one["algbw"])
            self.assertAllClose(64 / one["seconds"], one["busbw"])

        # As if it had been twice as slow, on another machine.
        written["machine"]["processor"] = "an abacus"
        one.update(seconds=1.0, spread=0.0)
        old.write_text(json.dumps(written))
        status, output, _ = _bench(*both, "--compare", str(old), "--json", str(new))
        self.assertEqual(status, 0, output)
        self.assertIn("old.json has other machine: {'processor': 'an abacus'", output)
        self.assertIn("Not in old.json, or not of this size: tf.ReductionToOneDevice", output)
        (row,) = [line.split() for line in output.splitlines() if " 1000000.0 " in line]
        self.assertIn(_OURS, row)
        (now,) = [one for one in json.loads(new.read_text())["results"] if one["name"] == _OURS]
        self.assertEqual(row[-2], f"{now['seconds'] * 1e6:.1f}")

    def test_a_step_that_does_not_end(self):
        ended: list[int] = []
        json_file = self.folder / "out.json"

        def slow(self: Any, devices: Any) -> Any:
            time.sleep(0.4)
            return reducer(self, devices)

        reducer = implementations.Implementation.reducer
        with (
            mock.patch.object(implementations.Implementation, "reducer", slow),
            # What hangs would hang for ever; here it goes on.
            mock.patch.object(os, "_exit", ended.append),
        ):
            _, _, errors = _bench("--ops", _OURS, "-T", "0.1", "-J", str(json_file))
        self.assertEqual(ended, [124])
        self.assertIn(f"tfcdo: {_OURS} took longer than --timeout 0.1 s", errors)

    @parameterized.parameters(
        (("--compare", "no-such.json"), "no-such.json: No such file or directory"),
        (("--compare", os.devnull), "is not a file that tfcdo bench --json wrote"),
        (("-T", "0"), "--timeout"),
        (("--fit", "-T", "5"), "--timeout cannot be given beside --fit"),
        (("--workers", "2", "-T", "5"), "--timeout cannot be given beside --workers"),
        (("--workers", "2", "--repeat", "0.9"), "--repeat is about the rows of --sparse"),
    )
    def test_a_wrong_option_gets_one_line(self, arguments: tuple[str, ...], named: str):
        self.assert_refused(named, "bench", *arguments)


class ReportTest(tf.test.TestCase):
    def test_averages_end_with_the_best_of_ours(self):
        results = [
            measurement_of("tfcdo.Slow", "tfcdo", 2e-3),
            measurement_of("tfcdo.Fast", "tfcdo", 1e-3),
            measurement_of("tfcdo.Fast", "tfcdo", 0.5e-3),
            measurement_of("tfcdo.Lost", "tfcdo", -1e-3),
            measurement_of(TF_HIERARCHICAL, "tf", 0.1e-3, wrong=3),
            measurement_of("copy", measure.FLOOR, 1e-6),
        ]
        output = io.StringIO()
        bench_report.show_averages(results, Console(file=output, width=80))
        self.assertEqual(
            output.getvalue().splitlines(),
            [
                "# Out of bounds values : 0 OK",
                # 4000 bytes on 4 devices: 1.5 * 4000 / time.
                f"# Avg bus bandwidth    : 0.06 ({TF_HIERARCHICAL})",
                "# Avg bus bandwidth    : 0.003 (tfcdo.Slow)",
                "# Avg bus bandwidth    : 0.009 (tfcdo.Fast)",
            ],
        )

    def test_a_change_within_the_spread_is_marked(self):
        earlier = bench_compare.Earlier("old", {}, {})
        before = dataclasses.asdict(measurement_of("tfcdo.X", "tfcdo", 1e-3))
        before["spread"] = 4e-4
        key = bench_compare._key_of(before)
        earlier = dataclasses.replace(earlier, results={key: before})
        for seconds, shown in ((1.3e-3, "± 1.30"), (2e-3, "2.00"), (-1e-6, "-")):
            output = io.StringIO()
            now = {"machine": 1, "devices": 2, "versions": 3}
            bench_compare.show(
                earlier,
                now,
                [measurement_of("tfcdo.X", "tfcdo", seconds)],
                Console(file=output, width=120),
            )
            (row,) = [line for line in output.getvalue().splitlines() if "tfcdo.X" in line]
            self.assertEndsWith(row.rstrip(), f" {shown}")


if __name__ == "__main__":
    tf.test.main()
