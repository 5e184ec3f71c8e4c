"""`tfcdo doctor` in this process, but for one probe; its findings on machines that no test has."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import bench_testing
import keras
import tensorflow as tf
import warm_python
from absl.testing import absltest, parameterized
from cli_testing import run_tfcdo

from tfcdo.bench import devices as bench_devices
from tfcdo.doctor import examination, probe
from tfcdo.doctor.examination import OK, WRONG, Check, Failure, Finding, Probes, Report
from tfcdo.execute import device_ops
from tfcdo.topology.presets import preset

setUpModule, tearDownModule = bench_testing.set_up, bench_testing.tear_down


class _InThisProcess(examination.Probes):
    """Asks a probe that is no process, and copies answers as a process would."""

    def __init__(self, count: int | None) -> None:
        super().__init__(count)
        self._probe = probe.Probe()

    def ask(self, question: str, **arguments: Any) -> Any:
        try:
            answer = getattr(self._probe, question)(**arguments)
        except RuntimeError as error:
            return Failure(f"RuntimeError: {error}")
        return pickle.loads(pickle.dumps(answer))


def _doctor(*arguments: str, tf_config: str = "{}") -> tuple[int, list[str]]:
    with (
        mock.patch.object(examination, "Probes", _InThisProcess),
        mock.patch.multiple(probe, _PATTERN_BYTES=4096, _SUM_BYTES=4096),
        # TensorFlow's collectives keep to one number of devices a process for each key, and the
        # bench's tests, whose number is another, may run in this one.
        mock.patch.object(tf.distribute.MirroredStrategy, "_collective_key_base", 1000),
        mock.patch.dict(os.environ, TF_CONFIG=tf_config),
    ):
        status, output, _ = run_tfcdo("doctor", *arguments)
    return status, output.splitlines()


def _lying_copy(tensors: Sequence[tf.Tensor], device: str, name: str | None = None) -> Any:
    """Copies like `device_ops.copy`, but what arrives on CPU:1 has its first element changed."""
    copies = _copy(tensors, device, name)
    if not device.endswith("CPU:1"):
        return copies
    with tf.device(device):
        changed = [tf.one_hot(0, tf.size(one), dtype=one.dtype) for one in copies]
        return [one + tf.reshape(add, tf.shape(one)) for one, add in zip(copies, changed)]


_copy = device_ops.copy


class DoctorTest(parameterized.TestCase):
    def test_three_devices(self):
        status, lines = _doctor("-g", "3")
        text = "\n".join(lines)
        self.assertEqual(status, 0, text)
        self.assertRegex(lines[0], r"^This machine: no problem, \d+ notes$")
        for shown in (
            f"tensorflow {tf.__version__}",
            "tfcdo.NcclAllReduce cannot run here: no NcclAllReduce kernel is registered for CPU",
            "shared_memory: CPU devices of one host",
            "ok     copies between all 6 ordered pairs of devices are correct",
            "ok     tfcdo.HierarchicalCopyAllReduce sums are correct",
            "note   tf.HierarchicalCopyAllReduce sums are incorrect: ",
            "→ use tfcdo.HierarchicalCopyAllReduce",
            "ok     metrics of fit under tfcdo.MirroredStrategy are correct",
            "ok     metrics of fit under tf.distribute.MirroredStrategy are correct",
        ):
            self.assertIn(shown, text)
        self.assertNotIn("  wrong  ", text)
        namespace: dict[str, Any] = {}
        exec(lines[-1], namespace)
        self.assertEqual(namespace["strategy"].num_replicas_in_sync, 3)

    def test_a_device_whose_copies_lie(self):
        compared = (("tfcdo.ReductionToOneDevice", "tf.NcclAllReduce"),)
        with (
            mock.patch.object(device_ops, "copy", _lying_copy),
            mock.patch.object(examination, "COMPARED", compared),
            mock.patch.object(examination, "STRATEGIES", examination.STRATEGIES[:1]),
            mock.patch.object(keras, "__version__", "3.9.2"),
        ):
            status, lines = _doctor("-g", "3")
        self.assertEqual(status, 1)
        text = "\n".join(lines)
        self.assertIn("  wrong  copies from CPU:0 to CPU:1, CPU:2 to CPU:1 arrive corrupted", text)
        self.assertIn("tfcdo.ReductionToOneDevice sums are incorrect: 1 of 3072 elements", text)
        self.assertIn("metrics of fit under tfcdo.MirroredStrategy are incorrect: loss is ", text)
        self.assertNotIn("Keras 3.9.2 adds", text)
        self.assertEqual(
            lines[-1],
            "import tfcdo; strategy = tfcdo.MirroredStrategy(['CPU:0', 'CPU:2'], "
            "cross_device_ops=tfcdo.ReductionToOneDevice())",
        )

    def test_a_wrong_tf_config_and_an_answer_that_is_an_error(self):
        error = RuntimeError("no devices today")
        with mock.patch.object(bench_devices, "choose_devices", side_effect=error):
            status, lines = _doctor(tf_config="{")
        self.assertEqual((status, lines[0]), (1, "This machine: 2 problems"))
        self.assertRegex("\n".join(lines), "(?m)^  wrong  TF_CONFIG must be JSON")
        self.assertIn("  wrong  the devices cannot be used: RuntimeError: no devices today", lines)

    @parameterized.parameters(
        (
            lambda: mock.patch.dict(sys.modules, tensorflow=None),
            "TensorFlow cannot be imported: .*",
            "pip install 'tensorflow>=2.16'",
        ),
        (
            lambda: mock.patch.object(tf, "__version__", "2.9.3"),
            "TensorFlow 2.9.3 is older than 2.16, the oldest that tfcdo runs on",
            "pip install --upgrade 'tensorflow>=2.16'",
        ),
        (
            lambda: mock.patch.dict(sys.modules, {"tfcdo.tf_internals": None}),
            f"TensorFlow {tf.__version__} lacks something that tfcdo needs: .*",
            "install a TensorFlow that docs/versions.md lists, or a newer tfcdo",
        ),
    )
    def test_a_tensorflow_that_cannot_be_used(self, patch: Any, text: str, remedy: str):
        with patch():
            status, lines = _doctor()
        self.assertEqual((status, lines[0]), (1, "This machine: 1 problem"))
        self.assertRegex(lines[1], f"^  wrong  {text}$")
        self.assertEqual(lines[-1], remedy)

    def test_a_tensorflow_that_is_not_too_old(self):
        for version in ("2.16.0", "2.16.0-rc1", "2.17.1", "3.0.0"):
            with mock.patch.object(tf, "__version__", version):
                self.assertEqual(probe.Probe().versions().problem, "", version)

    @parameterized.parameters(
        ((6, 1), False), ((8, 9), False), ((9, 0), False), ((5, 2), True), ((8, 0), True)
    )
    def test_a_gpu_that_tensorflow_has_no_kernels_for(self, capability, is_named):
        build = {"cuda_compute_capabilities": ["sm_60", "sm_70", "sm_86", "compute_90"]}
        config = mock.Mock()
        config.list_physical_devices.return_value = [tf.config.PhysicalDevice("x:GPU:2", "GPU")]
        config.experimental.get_device_details.return_value = {"compute_capability": capability}
        with (
            mock.patch.object(tf.sysconfig, "get_build_info", return_value=build),
            mock.patch.object(tf, "config", config),
        ):
            found = probe.Probe().versions().without_kernels
        named = ["GPU:2 (compute capability {}.{})".format(*capability)]
        self.assertEqual(found, named if is_named else [])

    def test_metrics_that_are_nan(self):
        asked = probe.Probe()
        asked.machine(2)
        nan = mock.patch.object(keras.metrics.Mean, "result", lambda self: tf.constant(math.nan))
        with mock.patch.object(keras, "__version__", "3.9.2"), nan:
            problem = asked.fit(examination.STRATEGIES[1]).problem
        self.assertRegex(
            problem,
            r"^loss is nan instead of 0\.\d+, mae is nan instead of 0\.\d+. Keras 3.9.2 adds the "
            "replicas' parts twice, until they are NaN; Keras 3.10 does not",
        )


# A probe that answers at once, but hangs for one pair and ends for another.
_FAKE_PROBE = """
import os, time
from tfcdo.bench import worker_pool
from tfcdo.doctor.examination import Check

class Probe:
    asked = []

    def machine(self, count):
        self.asked.append("machine")

    def pair(self, source, target):
        self.asked.append("pair")
        if (source, target) == (0, 1):
            time.sleep(60)
        if (source, target) == (1, 0):
            os.write(2, b"no such link")
            os._exit(7)
        if (source, target) == (2, 1):
            raise ValueError("no peer")
        return Check(f"{len(self.asked)} {os.environ['KERAS_HOME']}")

worker_pool.serve(Probe)
"""


class ProbesTest(absltest.TestCase):
    def test_a_probe_that_hangs_or_ends_is_replaced(self):
        with (
            mock.patch.object(examination.Probes, "_command", (sys.executable, "-c", _FAKE_PROBE)),
            mock.patch.dict(examination._LIMITS, pair=1.5),
            examination.Probes(2) as probes,
        ):
            pairs = dict(examination._pairs(probes.ask, 3, str))
        hangs, error, ends = (pairs.pop(pair) for pair in ((0, 1), (2, 1), (1, 0)))
        self.assertEqual(hangs, Failure("no end within 1.5 s", hangs=True))
        self.assertEqual(error, Failure("ValueError: no peer"))
        self.assertRegex(str(ends), r"ended with status 7(.*\\n)*no such link.*hangs=False")
        # A new probe was asked for its devices first; one that only reports an error goes on.
        numbers = {(0, 2): "2", (1, 2): "2", (2, 0): "3"}
        self.assertEqual(pairs, {pair: Check(f"{n} {os.devnull}") for pair, n in numbers.items()})

    def test_after_some_that_hang_the_rest_is_not_tried(self):
        pairs = dict(examination._pairs(mock.Mock(return_value=_HANGS), 3, str))
        self.assertEqual(list(pairs.values()), [_HANGS] * 3)

    def test_a_process_of_its_own(self):
        command = (warm_python.executable(), *examination.Probes._command[1:])
        python = mock.patch.object(examination.Probes, "_command", command)
        with python, mock.patch.dict(os.environ, TF_CONFIG="{"), examination.Probes(3) as probes:
            versions = probes.ask("versions")
            self.assertLen(probes.ask("machine", count=3).examined, 3)
            self.assertEqual(probes.ask("pair", source=2, target=0), Check())
        self.assertEqual((versions.tensorflow, versions.problem), (tf.__version__, ""))

    def test_a_file_in_the_current_folder_is_not_imported(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "numpy.py").write_text("raise SystemExit('a file of the user')")
            subprocess.run(Probes._command, input=b"", cwd=folder, check=True, timeout=300)


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
        more = dataclasses.replace(_MACHINE, logical=(*_GPUS, "/device:GPU:4"))
        self.check(_report(machine=more), script=r"\['GPU:0', 'GPU:1', 'GPU:2', 'GPU:3'\], cross")

    def test_no_tensorflow(self):
        script = "^pip install --force-reinstall tensorflow$"
        self.check(Report(Failure("x")), "wrong: TensorFlow does not start: x ->", script=script)

    def test_pairs_whose_copies_are_wrong_are_named_and_devices_left_out(self):
        wrong = {(3, 1): Failure("InternalError: no peer"), (1, 3): Check("3 bytes")}
        report = _report({(0, 2): _HANGS, (2, 3): _HANGS, (1, 0): None, **wrong})
        hosts = examination.TfConfig("{...}", hosts=(Finding(OK, "host 0"),))
        of_hosts = examination.script_line(dataclasses.replace(report, tf_config=hosts))
        self.assertRegex(of_hosts, r"gpus\[i\] for i in \(0, 1,\)\], .*devices_per_worker=2\)$")
        self.check(
            report,
            "wrong: copies from GPU:0 to GPU:2, GPU:2 to GPU:3 hang: no end within 15 s",
            "wrong: copies from GPU:3 to GPU:1 fail: InternalError: no peer",
            "wrong: copies from GPU:1 to GPU:3 arrive corrupted",
            "note: 1 pairs of devices were not tried, because others hang",
            script=r"\['GPU:0', 'GPU:1'\]",
        )

    def test_classes_and_fits_that_are_wrong_or_fail(self):
        checks = {
            "tfcdo.NcclAllReduce": _HANGS,
            "tfcdo.AutoAllReduce": Check("5 of 8 elements"),
            "tf.ReductionToOneDevice": Failure("ValueError: no"),
            _OURS: Check("loss is nan instead of 2"),
            _THEIRS: _HANGS,
        }
        self.check(
            _report(checks=checks),
            "wrong: tfcdo.AutoAllReduce sums are incorrect: 5 of 8 elements ->",
            "note: tf.ReductionToOneDevice sums fail: ValueError: no ->",
            "wrong: tfcdo.NcclAllReduce sums fail: no end within 15 s ->",
            f"wrong: metrics of fit under {_OURS} are incorrect: loss is nan instead of 2 -> see "
            "the copies above; if all are correct, ",
            f"note: metrics of fit under {_THEIRS} fail: .* -> use tfcdo.MirroredStrategy$",
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
        self.check(
            _report(
                versions=dataclasses.replace(_VERSIONS, without_kernels=["GPU:1 (5)", "GPU:3"]),
                machine=dataclasses.replace(_MACHINE, topology_reason=reason),
                tf_config=examination.TfConfig("{...}", hosts=hosts),
            ),
            "wrong: host 1 -> a",
            r"note: TensorFlow 2.21.0 has no compiled kernels for GPU:1 \(5\), GPU:3: ",
            "note: the topology is assumed to be 'fully_connected'",
            script=r"tfcdo.MultiWorkerMirroredStrategy\(",
        )


class TfConfigTest(absltest.TestCase):
    def examine(self, *addresses: str) -> tuple[Finding, ...]:
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": "0"}}
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
            used, _, nameless = self.examine(there, f"localhost{there[9:]}", "no-such..host:2222")
        for one, pattern in (
            (reached[0], "ok: host 0 .*: this process's own; the port is free"),
            (reached[1], "ok: host 1 .*: a worker listens there"),
            (reached[2], "ok: host 2 .*: the machine answers; no worker listens there yet"),
            (nobody, "wrong: host 3 .*: not reached: .*firewalls"),
            (nameless, "wrong: host 2 .*: not reached: .*label empty.*firewalls"),
            (used, r"wrong: port \d+ of host 0 .* cannot be used .* end the process that uses it"),
        ):
            self.assertRegex(f"{one.severity}: {one.text} {one.remedy}", f"^{pattern}")

    def test_not_set(self):
        with mock.patch.dict(os.environ, TF_CONFIG=""):
            self.assertEqual(examination.examine_tf_config(), examination.TfConfig(""))


if __name__ == "__main__":
    tf.test.main()
