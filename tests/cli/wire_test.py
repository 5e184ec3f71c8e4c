"""Tests of 16-bit copies in `tfcdo plan` and `tfcdo bench`: they count the bytes sent."""

from __future__ import annotations

import json

import tensorflow as tf
from absl.testing import parameterized
from bench_testing import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from cli_testing import CommandTestCase

_CAST = "tfcdo.HierarchicalCopyAllReduce(wire_dtype='bfloat16')"


class WireTest(tf.test.TestCase, CommandTestCase):
    @parameterized.parameters("bfloat16", "float16")
    def test_a_plan_is_of_half_the_bytes(self, wire):
        def ring(*arguments: str) -> tuple[str, list[str]]:
            output = self.output_of("plan", "-t", "dgx1", "-a", "ring", *arguments)
            (row,) = [line for line in output.splitlines() if line.startswith("│ ring ")]
            return output, [cell.strip() for cell in row.split("│")]

        output, cast = ring("-b", "8MB", "--wire", wire)
        self.assertIn(f"All-reduce of 8.00 MB, sent as 4.00 MB of {wire} on each of 8", output)
        self.assertEqual(ring("-b", "4MB")[1], cast)

    def test_additions_are_of_all_bytes(self):
        def seconds(*arguments: str) -> float:
            output = self.output_of(
                "plan", "-t", "shared_memory:4", "-a", "one_device", "--json", *arguments
            )
            return json.loads(output)["seconds"]

        # Copies cost next to nothing there.
        self.assertAllClose(seconds("-b", "64MB"), seconds("-b", "64MB", "--wire", "float16"), 0.05)

    def test_between_hosts_it_is_refused(self):
        self.assert_refused(
            "--wire is of the copies inside a host",
            *("plan", "-t", "dgx1", "--hosts", "2", "--wire", "bfloat16"),
        )

    def test_a_bench_of_cast_values(self):
        file = self.folder / "results.json"
        self.output_of(
            *("bench", "-b", "4K", "-e", "4K", "-g", "2", "-n", "1", "-w", "0"),
            *("--ops", _CAST, "--ops", "tf.ReductionToOneDevice", "-J", str(file)),
        )
        results = {one["name"]: one for one in json.loads(file.read_text())["results"]}
        ours = results[_CAST]
        self.assertEqual((4096, 2048, 0), (ours["size"], ours["sent_size"], ours["wrong"]))
        theirs = results["tf.ReductionToOneDevice"]
        self.assertIsNone(theirs["sent_size"])


if __name__ == "__main__":
    tf.test.main()
