"""`tfcdo bench sparse`: what is measured is right, and what is wrong is found."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from bench_testing import (
    QUICK,
    ForgetsTheLastDevice,
    implementation_of,
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from cli_testing import CommandTestCase, run_tfcdo

from tfcdo.bench import devices, implementations, rows

SMALL = functools.partial(rows.TableRows, table_rows=40, width=3)


class ForgetsTheLastRows(ForgetsTheLastDevice):
    def batch_reduce(self, reduce_op, value_destination_pairs, options=None):
        results = tf.distribute.ReductionToOneDevice().batch_reduce(
            reduce_op, value_destination_pairs
        )
        for part in results[0].values[:-1]:
            part._values = part.values[:-1]
            part._indices = part.indices[:-1]
        return results


class RowsTest(tf.test.TestCase, CommandTestCase):
    @parameterized.parameters((0.0, 24), (0.5, 16), (0.9, 10), (1.0, 8))
    def test_indices(self, repeat, different):
        drawn = rows.TableRows(8, repeat, table_rows=24).draw_indices(3)
        self.assertEqual([8] * 3, [len(set(own)) for own in drawn])
        self.assertLen(np.unique(drawn), different)
        with self.assertRaisesRegex(ValueError, "24 rows, of which 4 devices with 8 rows each"):
            rows.TableRows(8, 0.0, table_rows=24).draw_indices(4)

    def test_updates_are_checked(self):
        names = ("tfcdo.AutoAllReduce", "tf.ReductionToOneDevice", "tf.CollectiveAllReduce")
        compared = [implementation_of(name) for name in names]
        # TensorFlow's collectives keep to one number of devices a process: 2 in the bench's tests.
        results = rows.run(SMALL(8, 0.5), devices.choose_devices(2), compared, QUICK)
        self.assertEqual(
            [(name, update, 0) for name in (*names, rows.ALONE) for update in ("SGD", "momentum")],
            [(one.name, one.update, one.wrong) for one in results],
        )
        self.assertEqual(["tfcdo", "tf", "tf", rows.ALONE], [one.kind for one in results[::2]])
        for one in results:
            self.assertGreater(one.seconds, 0)

    def test_wrong_updates_are_found(self):
        implementation = implementation_of("tf.ReductionToOneDevice")
        reduce = ForgetsTheLastRows().batch_reduce
        with mock.patch.object(implementations, "_batch_reduce", lambda *_: reduce):
            results = rows.run(SMALL(8, 0.0), devices.choose_devices(2), [implementation], QUICK)
        for one in results[:2]:
            # One row of one device, of whose numbers some are zeros.
            self.assertBetween(one.wrong, 1, 3)

    def test_command(self):
        arguments = ("sparse", "8", "--repeat", "0.25", "-g", "2", "-n", "1", "-w", "0")
        names = ("--ops", "tfcdo", "--ops", "tf.ReductionToOneDevice")
        with mock.patch.object(rows, "TableRows", SMALL):
            output = self.output_of("bench", *arguments, *names)
        self.assertIn("8 rows on each of 2 devices, 25% of them on all", output)
        self.assertRegex(output, r"updating alone +\S+ +\S+ +\S+ .* 0")
        self.assertRegex(output, r"tf.ReductionToOneDevice +\S+ +\S+ +1.00 .* 1.00 +0")

    @parameterized.parameters(
        ("sparse", "Missing argument 'ROWS'"),
        ("sparse 8 --model tiny", "No such option"),
        ("sparse 39 -g 2 --repeat 0", "the table has"),
        ("sparse 8 -g 2 --ops tfcdo.AutoAllReduce(sparse_as_dense=True)", "gives dense"),
    )
    def test_arguments_that_cannot_be_used(self, arguments: str, named: str):
        with mock.patch.object(rows, "TableRows", SMALL):
            status, _, errors = run_tfcdo("bench", *arguments.split())
        self.assertEqual(2, status)
        self.assertIn(named, errors)


if __name__ == "__main__":
    tf.test.main()
