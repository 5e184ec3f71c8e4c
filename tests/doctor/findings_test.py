"""What the doctor makes of a report, on machines that no test has; and TF_CONFIG."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
from collections.abc import Mapping
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized

from tfcdo.doctor import examination
from tfcdo.doctor.examination import NOTE, OK, WRONG, Finding, Report
from tfcdo.topology.presets import preset

_GPUS = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(4))


_PAIRS = list(itertools.permutations(range(4), 2))


def _report(**changes: Any) -> Report:
    """A machine of four GPUs on which all is well, but for what is said."""
    names = tuple(itertools.chain.from_iterable(examination.COMPARED))
    report = Report(
        versions=examination.Versions("0.1.0", "3.12.1", tensorflow="2.21.0"),
        machine=_MACHINE,
        pairs={pair: examination.Check() for pair in _PAIRS},
        checks=dict.fromkeys(names, examination.Check()),
    )
    return dataclasses.replace(report, **changes)


# Its links have 25 GB/s.
_MACHINE = examination.Machine(
    physical=tuple(f"/physical_device:GPU:{number}" for number in range(4)),
    logical=_GPUS,
    examined=_GPUS,
    description="4 x Some GPU",
    on_cpu=False,
    gpus_of_nvidia_smi=("Some GPU",) * 4,
    topology=preset("fully_connected", 4),
    topology_reason="as nvidia-smi reports",
)


def _with_pairs(changes: Mapping[tuple[int, int], Any], **others: Any) -> Report:
    report = _report(**others)
    return dataclasses.replace(report, pairs={**report.pairs, **changes})


def _with_checks(changes: Mapping[str, Any], **others: Any) -> Report:
    report = _report(**others)
    return dataclasses.replace(report, checks={**report.checks, **changes})


def _texts(report: Report, severity: str) -> list[str]:
    return [one.text for one in examination.findings_of(report) if one.severity == severity]


class FindingsTest(parameterized.TestCase):
    def test_a_good_machine(self):
        report = _report()
        self.assertEmpty(_texts(report, WRONG) + _texts(report, NOTE))
        self.assertEqual(
            examination.script_line(report),
            "import tfcdo; strategy = "
            "tfcdo.MirroredStrategy(cross_device_ops=tfcdo.NcclAllReduce())",
        )

    def test_what_is_not_ok_has_a_remedy_on_one_line(self):
        report = _with_pairs(
            {(0, 1): examination.Check("3 bytes"), (1, 2): examination.Failure("y")},
            versions=examination.Failure("x"),
        )
        for finding in examination.findings_of(report):
            if finding.severity != OK:
                self.assertNotEmpty(finding.remedy)
                self.assertNotIn("\n", finding.remedy)

    def test_pairs_that_hang_are_named_and_their_devices_left_out(self):
        hangs = examination.Failure("no end within 15 s", hangs=True)
        report = _with_pairs({(0, 2): hangs, (2, 3): hangs})
        tried = {pair: copies for pair, copies in report.pairs.items() if pair != (1, 0)}
        report = dataclasses.replace(report, pairs=tried)
        (text,) = _texts(report, WRONG)
        self.assertEqual(
            text, "copies from GPU:0 to GPU:2, GPU:2 to GPU:3 hang: no end within 15 s"
        )
        self.assertEqual(
            _texts(report, NOTE), ["1 pairs of devices were not tried, because others hang"]
        )
        self.assertIn("['GPU:0', 'GPU:1', 'GPU:3']", examination.script_line(report))

    def test_copies_that_raise_an_error_fail(self):
        # The probe goes on, which says nothing of hanging.
        report = _with_pairs({(0, 2): examination.Failure("InternalError: no peer")})
        text = "copies from GPU:0 to GPU:2 fail: InternalError: no peer"
        self.assertEqual(_texts(report, WRONG), [text])

    def test_a_fit_whose_metrics_are_incorrect(self):
        ours, theirs = examination.STRATEGIES
        nan = examination.Check("loss is nan instead of 2")
        found = examination.findings_of(_report(checks={ours: nan, theirs: nan}))
        wrong, note = (one for one in found if one.severity != OK)
        self.assertEqual((wrong.severity, note.severity), (WRONG, NOTE))
        text = "metrics of fit under tfcdo.MirroredStrategy are incorrect: loss is nan instead of 2"
        self.assertEqual(wrong.text, text)
        self.assertStartsWith(wrong.remedy, "see the copies above; if all are correct, ")
        self.assertEqual(note.remedy, "use tfcdo.MirroredStrategy")

    def test_a_fit_that_fails(self):
        failure = examination.Failure("no end within 120 s", hangs=True)
        report = _report(checks=dict.fromkeys(examination.STRATEGIES, failure))
        text = "metrics of fit under tfcdo.MirroredStrategy fail: no end within 120 s"
        self.assertEqual(_texts(report, WRONG), [text])
        self.assertLen(_texts(report, NOTE), 1)

    def test_gpus_that_tensorflow_has_no_kernels_for(self):
        versions = examination.Versions(
            "0.1.0", "3.12.1", tensorflow="2.21.0", without_kernels=["GPU:1 (compute ...)", "GPU:3"]
        )
        (text,) = _texts(_report(versions=versions), NOTE)
        self.assertIn("has no compiled kernels for GPU:1 (compute ...), GPU:3: ", text)

    def test_classes_that_are_wrong_or_fail(self):
        report = _with_checks(
            {
                "tfcdo.NcclAllReduce": examination.Failure("no end within 60 s", hangs=True),
                "tfcdo.AutoAllReduce": examination.Check("5 of 8 elements"),
                "tf.ReductionToOneDevice": examination.Failure("ValueError: no"),
            }
        )
        self.assertEqual(
            _texts(report, WRONG),
            [
                "tfcdo.AutoAllReduce sums are incorrect: 5 of 8 elements",
                "tfcdo.NcclAllReduce sums fail: no end within 60 s",
            ],
        )
        self.assertEqual(
            _texts(report, NOTE), ["tf.ReductionToOneDevice sums fail: ValueError: no"]
        )
        # The line names a class whose sums are right.
        self.assertIn("=tfcdo.HierarchicalCopyAllReduce()", examination.script_line(report))

    def test_gpus_that_tensorflow_does_not_see(self):
        physical = ("/physical_device:CPU:0",)
        report = _with_checks(
            {"tfcdo.NcclAllReduce": examination.Check(ran=False)},
            machine=dataclasses.replace(_MACHINE, physical=physical, on_cpu=True),
        )
        seen, examined = _texts(report, NOTE)
        self.assertEqual(seen, "nvidia-smi shows 4 GPUs, and TensorFlow none")
        self.assertIn("TensorFlow sees no GPU", examined)
        self.assertIn(
            "configure_virtual_cpus(4), cross_device_ops=tfcdo.AutoAllReduce()",
            examination.script_line(report),
        )

    def test_an_assumed_topology(self):
        reason = "there is no nvidia-smi on the PATH; pass topology= to say what joins them"
        report = _report(machine=dataclasses.replace(_MACHINE, topology_reason=reason))
        (text,) = _texts(report, NOTE)
        self.assertStartsWith(text, "the topology is assumed to be 'fully_connected'")

    def test_several_hosts(self):
        hosts = Finding(OK, "host 0: status"), Finding(WRONG, "host 1: status", "a remedy")
        report = _report(tf_config=examination.TfConfig("{...}", hosts=hosts))
        self.assertEqual(_texts(report, WRONG), ["host 1: status"])
        self.assertIn("tfcdo.MultiWorkerMirroredStrategy(", examination.script_line(report))


class TfConfigTest(absltest.TestCase):
    def examine(self, *addresses: str) -> tuple[Finding, ...]:
        config = {
            "cluster": {"worker": list(addresses)},
            "task": {"type": "worker", "index": "0"},
        }
        with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)):
            return examination.examine_tf_config().hosts

    def test_hosts_are_reached_or_not(self):
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            there, refusing = (f"127.0.0.1:{one.getsockname()[1]}" for one in (listening, held))
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                own = f"127.0.0.1:{free.getsockname()[1]}"
            unknown = "no-such-host.invalid:2222"
            mine, listens, refuses, nobody = self.examine(own, there, refusing, unknown)
        self.assertEqual([one.severity for one in (mine, listens, refuses)], [OK] * 3)
        self.assertRegex(mine.text, r"^host 0 .*: this process's own; the port is free$")
        self.assertRegex(listens.text, r"^host 1 .*: a worker listens there$")
        self.assertIn("no worker listens there yet", refuses.text)
        self.assertEqual(nobody.severity, WRONG)
        self.assertRegex(nobody.text, "^host 3 .*: not reached: ")
        self.assertIn("firewalls", nobody.remedy)

    def test_its_own_port_is_in_use(self):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            (own, _) = self.examine(
                f"127.0.0.1:{listening.getsockname()[1]}", f"localhost:{listening.getsockname()[1]}"
            )
        self.assertEqual(own.severity, WRONG)
        self.assertIn("own port cannot be used", own.text)
        self.assertIn("end the process that uses the port", own.remedy)

    def test_not_set(self):
        with mock.patch.dict(os.environ, TF_CONFIG=""):
            self.assertEqual(examination.examine_tf_config(), examination.TfConfig(""))


if __name__ == "__main__":
    absltest.main()
