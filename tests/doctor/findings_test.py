"""What the doctor makes of a report, on machines that no test has; and TF_CONFIG."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
from typing import Any
from unittest import mock

from absl.testing import absltest

from tfcdo.doctor import examination
from tfcdo.doctor.examination import OK, WRONG, Check, Failure, Finding, Report
from tfcdo.topology.presets import preset

_GPUS = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(4))
_VERSIONS = examination.Versions("0.1.0", "3.12.1", tensorflow="2.21.0")
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
_OURS, _THEIRS = examination.STRATEGIES
_HANGS = Failure("no end within 15 s", hangs=True)


def _report(pairs: Any = (), checks: Any = (), **changes: Any) -> Report:
    """A machine of four GPUs on which all is well, except the arguments; None was not tried."""
    good = dict.fromkeys(itertools.permutations(range(4), 2), Check())
    sums = dict.fromkeys(itertools.chain.from_iterable(examination.COMPARED), Check())
    changes = {"versions": _VERSIONS, "machine": _MACHINE, **changes}
    tried = {pair: copies for pair, copies in {**good, **dict(pairs)}.items() if copies}
    return Report(pairs=tried, checks={**sums, **dict(checks)}, **changes)


class FindingsTest(absltest.TestCase):
    def check(self, report: Report, *patterns: str, script: str = "NcclAllReduce") -> None:
        found = [one for one in examination.findings_of(report) if one.severity != OK]
        self.assertLen(found, len(patterns), found)
        for one, pattern in zip(found, patterns):
            self.assertRegex(f"{one.severity}: {one.text} -> {one.remedy}", f"^{pattern}")
            self.assertRegex(one.remedy, "^.+$")
        self.assertRegex(examination.script_line(report), script)

    def test_a_good_machine(self):
        ops = r"cross_device_ops=tfcdo.NcclAllReduce\(\)"
        script = rf"^import tfcdo; strategy = tfcdo.MirroredStrategy\({ops}\)$"
        self.check(_report(), script=script)

    def test_no_tensorflow(self):
        script = "^pip install --force-reinstall tensorflow$"
        self.check(Report(Failure("x")), "wrong: TensorFlow does not start: x ->", script=script)

    def test_pairs_that_hang_are_named_and_their_devices_left_out(self):
        self.check(
            _report({(0, 2): _HANGS, (2, 3): _HANGS, (1, 0): None}),
            "wrong: copies from GPU:0 to GPU:2, GPU:2 to GPU:3 hang: no end within 15 s",
            "note: 1 pairs of devices were not tried, because others hang",
            script=r"\['GPU:0', 'GPU:1', 'GPU:3'\]",
        )

    def test_copies_that_lie_or_raise_an_error(self):
        self.check(
            _report({(0, 2): Failure("InternalError: no peer"), (3, 1): Check("3 bytes")}),
            "wrong: copies from GPU:0 to GPU:2 fail: InternalError: no peer",
            "wrong: copies from GPU:3 to GPU:1 arrive corrupted",
            script=r"\['GPU:0', 'GPU:1'\]",
        )

    def test_a_fit_that_is_incorrect_or_fails(self):
        self.check(
            _report(checks={_OURS: Check("loss is nan instead of 2"), _THEIRS: _HANGS}),
            f"wrong: metrics of fit under {_OURS} are incorrect: loss is nan instead of 2 -> see "
            "the copies above; if all are correct, ",
            f"note: metrics of fit under {_THEIRS} fail: .* -> use tfcdo.MirroredStrategy$",
        )

    def test_classes_that_are_wrong_or_fail(self):
        checks = {
            "tfcdo.NcclAllReduce": _HANGS,
            "tfcdo.AutoAllReduce": Check("5 of 8 elements"),
            "tf.ReductionToOneDevice": Failure("ValueError: no"),
        }
        self.check(
            _report(checks=checks),
            "wrong: tfcdo.AutoAllReduce sums are incorrect: 5 of 8 elements ->",
            "note: tf.ReductionToOneDevice sums fail: ValueError: no ->",
            "wrong: tfcdo.NcclAllReduce sums fail: no end within 15 s ->",
            script=r"=tfcdo.HierarchicalCopyAllReduce\(\)",
        )

    def test_gpus_that_tensorflow_does_not_see(self):
        machine = dataclasses.replace(_MACHINE, physical=("/physical_device:CPU:0",), on_cpu=True)
        self.check(
            _report(checks={"tfcdo.NcclAllReduce": Check(ran=False)}, machine=machine),
            "note: nvidia-smi shows 4 GPUs, and TensorFlow none ->",
            "note: TensorFlow sees no GPU",
            script=r"configure_virtual_cpus\(4\), cross_device_ops=tfcdo.AutoAllReduce\(\)",
        )

    def test_kernels_that_are_missing_an_assumed_topology_and_several_hosts(self):
        hosts = Finding(OK, "host 0"), Finding(WRONG, "host 1", "a remedy")
        reason = "no nvidia-smi; pass topology= to say what joins them"
        report = _report(
            versions=dataclasses.replace(_VERSIONS, without_kernels=["GPU:1 (5)", "GPU:3"]),
            machine=dataclasses.replace(_MACHINE, topology_reason=reason),
            tf_config=examination.TfConfig("{...}", hosts=hosts),
        )
        self.check(
            report,
            "wrong: host 1 -> a",
            r"note: TensorFlow 2.21.0 has no compiled kernels for GPU:1 \(5\), GPU:3: ",
            "note: the topology is assumed to be 'fully_connected'",
            script=r"tfcdo.MultiWorkerMirroredStrategy\(",
        )


class TfConfigTest(absltest.TestCase):
    def examine(self, *addresses: str) -> tuple[Finding, ...]:
        task = {"type": "worker", "index": "0"}
        config = {"cluster": {"worker": addresses}, "task": task}
        with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)):
            return examination.examine_tf_config().hosts

    def test_hosts_are_reached_or_not(self):
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            there, refusing = (f"127.0.0.1:{one.getsockname()[1]}" for one in (listening, held))
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                own = f"127.0.0.1:{free.getsockname()[1]}"
            *reached, nobody = self.examine(own, there, refusing, "no-such-host.invalid:2222")
            used, _ = self.examine(there, there.replace("127.0.0.1", "localhost"))
        for one, pattern in (
            (reached[0], "ok: host 0 .*: this process's own; the port is free"),
            (reached[1], "ok: host 1 .*: a worker listens there"),
            (reached[2], "ok: host 2 .*: the machine answers; no worker listens there yet"),
            (nobody, "wrong: host 3 .*: not reached: .*firewalls"),
            (used, "wrong: host 0 .*own port cannot be used.*end the process that uses the port"),
        ):
            self.assertRegex(f"{one.severity}: {one.text} {one.remedy}", f"^{pattern}")

    def test_not_set(self):
        with mock.patch.dict(os.environ, TF_CONFIG=""):
            self.assertEqual(examination.examine_tf_config(), examination.TfConfig(""))


if __name__ == "__main__":
    absltest.main()
