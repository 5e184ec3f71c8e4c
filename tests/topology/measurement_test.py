"""Measuring this machine: what copies share, in a file, and used where it is passed."""

import itertools
import json
import math
from collections.abc import Sequence
from unittest import mock

import cli_testing
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from topology_testing import measure_briefly, meet

import tfcdo
from tfcdo import topology
from tfcdo.topology import Resource, Route, Topology, detection, preset
from tfcdo.topology.links import ordered_pairs
from tfcdo.topology.measurement import infer_routes
from tfcdo.topology.topology import FORMAT


class MeasureTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = measure_briefly(self)

    def test_is_not_used_unasked(self):
        devices = tu.device_names(3)
        parts: list[float] = []
        found = topology.measure(devices, progress=lambda done, what: parts.append(done))
        self.assertEqual(parts, sorted(parts))
        self.assertEqual((parts[0], parts[-1]), (0.0, 1.0))
        self.assertRegex(found.name, "^measured 3 CPU devices of .* with [0-9]+ cores$")
        self.assertTrue(found.is_measured)
        self.assertEqual((found.bandwidth(0, 2), found.latency(1, 0)), (math.inf, 0.0))
        self.assertTrue(found.serial_reduction)
        # How large they are is not asserted: so little is timed that a busy machine could upset it.
        self.assertBetween(found.addition_bandwidth, 1.0, 1e15)
        self.assertEmpty(list(self.folder.iterdir()))
        detection.detect_with_reason.cache_clear()
        reason = tfcdo.AutoAllReduce(nccl=False).explain([(3,)], devices=devices).reason
        self.assertIn("the topology 'shared_memory' was detected", reason)

    def test_is_used_where_it_is_passed(self):
        devices, path = tu.device_names(3), self.folder / "mine.json"
        found = topology.measure(devices, path=path)
        self.assertEqual([path], list(self.folder.iterdir()))
        self.assertEqual(json.loads(path.read_text())["format"], FORMAT)
        written = self.folder / "topology.json"
        written.write_text(found.to_json())
        for given in (path, str(path), written, found):
            ops = tfcdo.HierarchicalCopyAllReduce(topology=given)
            told = ops.explain([(3,)], devices=devices)
            self.assertIn(f"the topology {found.name!r} was given", told.reason)
            self.assertIn(found.name, repr(ops))

    def test_a_command_plans_for_this_machine(self):
        status, output, errors = cli_testing.run_tfcdo("plan", "-t", "here:3", "-b", "1MB")
        self.assertEqual(status, 0, errors)
        name = detection.name_of_measured(tu.device_names(3)) or ""
        self.assertStartsWith(name, "measured 3 CPU devices of ")
        self.assertIn(name, " ".join(output.split()))
        self.assertIn("0% additions", errors)

    def test_other_files_are_refused(self):
        damaged = self.folder / "damaged.json"
        machine = preset("pcie", 2).to_json().replace('"format": 2,', "").encode()
        times = b'{"topology": %s, "date": "", "nccl": %%s}' % machine
        for content, reason in (
            (b"{", "not a JSON text"),
            (b'{"date": "2026-01-01"}', "missing required field `topology`"),
            (b"\xff", "codec can't decode"),
            (times % b"[[8, 0.1], [8, 0.1]]", r"ascending order, each once; got \[8, 8\]"),
            (times % b"[[9, 0.1], [8, 0.1]]", "ascending order"),
            (times % b"[[0, 0.1]]", r"`int` >= 1 - at `\$.nccl"),
            (times % b"[[8, -0.1]]", r"`float` > 0.0 - at `\$.nccl"),
            (times % b"[[8, Infinity]]", r"`float` <= 1.79.* - at `\$.nccl"),
            (times % b"[[1%030d, 0.1]]" % 0, "int"),
            (times % b"[[8, NaN]]", r"`float` > 0.0 - at `\$.nccl"),
        ):
            damaged.write_bytes(content)
            with self.assertRaisesRegex(ValueError, f"topology must be .*damaged.json: .*{reason}"):
                tfcdo.AutoAllReduce(topology=damaged)
        missing = "topology must be a file .*none.json: No such file"
        with self.assertRaisesRegex(ValueError, missing):
            tfcdo.AutoAllReduce(topology=self.folder / "none.json")
        with self.assertRaisesRegex(TypeError, "topology must be a .*, the path of .*; got 5"):
            tfcdo.AutoAllReduce(topology=5)  # type: ignore[arg-type]
        self.assertRaises(OSError, topology.measure, tu.device_names(2), path=damaged / "mine.json")
        with self.assertRaisesRegex(TypeError, "progress must be a function or None; got 5"):
            topology.measure(tu.device_names(2), progress=5)  # type: ignore[arg-type]

    @parameterized.parameters(
        (["CPU:0", "CPU:0"], "different CPUs or GPUs of this host; got .*CPU:0"),
        (["CPU:0", "GPU:0"], "different CPUs or GPUs"),
        (["TPU:0"], "different CPUs or GPUs"),
        (["/job:w/task:0/device:CPU:0", "/job:w/task:1/device:CPU:0"], "of this host"),
        ([f"CPU:{number}" for number in range(17)], "at most 16; got 17"),
        (["GPU:0", "GPU:1"], "that exist; got 'GPU:0', there are .*CPU:0"),
        (["CPU:0", "CPU:99"], "that exist; got 'CPU:99'"),
        (["CPU:0", "/cpu:0"], "different .* got '/cpu:0'"),
        (["nonsense"], "that exist; got 'nonsense'"),
        ([3], "a device name such as .* got 3"),
    )
    def test_other_devices_are_refused(self, devices, message):
        with self.assertRaisesRegex(ValueError, f"devices must be .*{message}"):
            topology.measure(devices)


def _half_duplex() -> Topology:
    wires = [Resource("a", 5e9), Resource("b", 20e9), Resource("c", 20e9)]
    routes = [Route(*pair, [wires[sum(pair) - 1]], latency=3e-6) for pair in ordered_pairs(3)]
    return Topology.from_routes("half duplex", 3, routes)


class InferenceTest(parameterized.TestCase):
    @parameterized.parameters(
        # Fast links without a common device are not tried together: of the 66 pairs of 12 links,
        # 12 of one source, 12 of one target, and 6 back and forth.
        (preset("nvswitch", 4), 0.0, 30),
        (preset("pcie", 4), 0.1),
        (preset("dgx1").subset([0, 1, 2, 4, 5]), 0.1),
        (_half_duplex(), 0.0),
    )
    def test_finds_the_links_and_what_they_share(self, machine, noise, calls=None):
        def time_copies(pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
            """Times one copy, or two: one after the other if they share anything, else at once."""
            times = [machine.latency(*p) + num_bytes / machine.bandwidth(*p) for p in pairs]
            add = sum if len(pairs) == 2 and meet(machine, *pairs) else max
            return add(times) * (1 + noise * (-1) ** clock.call_count)

        clock = mock.Mock(side_effect=time_copies)
        pairs = list(ordered_pairs(machine.num_devices))
        alone = [
            Route(*pair, [Resource(f"{pair}", machine.bandwidth(*pair))], latency=latency)
            for pair in pairs
            for latency in [machine.latency(*pair)]
        ]
        routes = infer_routes(alone, clock, 10**7)
        found = Topology.from_routes("found", machine.num_devices, routes)
        for pair in pairs:
            self.assertEqual(found.bandwidth(*pair), machine.bandwidth(*pair))
            self.assertEqual(found.latency(*pair), machine.latency(*pair))
        for one, other in itertools.combinations(pairs, 2):
            self.assertEqual(meet(found, one, other), meet(machine, one, other), (one, other))
        self.assertEqual(clock.call_count, calls or clock.call_count)


if __name__ == "__main__":
    tf.test.main()
