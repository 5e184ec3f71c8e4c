"""`tfcdo doctor` where TensorFlow answers: in this process, but for one probe of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from absl.testing import absltest, parameterized
from bench_testing import (
    setUpModule,  # noqa: F401
    tearDownModule,  # noqa: F401
)
from cli_testing import run_tfcdo

from tfcdo.bench import worker_pool
from tfcdo.doctor import answers, examination, probe, self_test
from tfcdo.execute import copy_trees

Ask = Callable[[Mapping[str, Any], float], Any]


class _InThisProcess(examination.Probes):
    """Asks a probe that is no process, and puts answers through JSON as a process would."""

    def __init__(self, count: int | None, limits: examination.Limits) -> None:
        super().__init__(count, limits)
        self._probe = probe.Probe()

    def ask(self, question: Mapping[str, Any], seconds: float) -> Any:
        del seconds
        return json.loads(json.dumps(self._probe.answer(json.loads(json.dumps(question)))))


def _doctor(*arguments: str, tf_config: str = "") -> tuple[int, list[str]]:
    """Runs the command; returns its status and its lines."""
    with (
        mock.patch.object(examination, "Probes", _InThisProcess),
        mock.patch.object(examination, "_SECONDS_OF_PAIRS", 0.01),
        mock.patch.object(self_test, "_PATTERN_BYTES", {True: 4096}),
        mock.patch.object(self_test, "_SUM_BYTES", 4096),
        # TensorFlow's collectives keep to one number of devices a process for each key, and the
        # bench's tests, whose number is another, may run in this one.
        mock.patch.object(tf.distribute.MirroredStrategy, "_collective_key_base", 1000),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("TF_CONFIG", None)
        if tf_config:
            os.environ["TF_CONFIG"] = tf_config
        status, output, _ = run_tfcdo("doctor", *arguments)
    return status, output.splitlines()


def _lying_copy(tensors: Sequence[tf.Tensor], device: str, name: str | None = None) -> Any:
    """Copies like `copy_trees.copy`, but what arrives on CPU:1 has its first element changed."""
    copies = _copy(tensors, device, name)
    if not device.endswith("CPU:1"):
        return copies
    with tf.device(device):
        return [tf.concat([one[:1] + tf.ones_like(one[:1]), one[1:]], 0) for one in copies]


_copy = copy_trees.copy


class DoctorTest(parameterized.TestCase):
    def test_three_devices(self):
        status, lines = _doctor("-g", "3")
        text = "\n".join(lines)
        self.assertEqual(status, 0, text)
        self.assertRegex(lines[0], r"^This machine: no problem, \d+ notes$")
        for shown in (
            f"tensorflow {tf.__version__}",
            "NcclAllReduce: no, no NcclAllReduce kernel is registered for CPU devices",
            "shared_memory: CPU devices of one host",
            "mobilenet (14.0 MB in 158 gradients): ",
            "bert-base (438 MB in 199 gradients): ",
            "ok     copies between all 6 ordered pairs of devices are correct",
            "ok     tfcdo.HierarchicalCopyAllReduce sums are correct",
            # TensorFlow's fault is told, but nothing is wrong here.
            "note   tf.HierarchicalCopyAllReduce sums are incorrect: ",
            "→ use tfcdo.HierarchicalCopyAllReduce",
        ):
            self.assertIn(shown, text)
        self.assertNotIn("  wrong  ", text)
        namespace: dict[str, Any] = {}
        exec(lines[-1], namespace)
        self.assertEqual(namespace["strategy"].num_replicas_in_sync, 3)

    def test_a_device_whose_copies_lie(self):
        with mock.patch.object(copy_trees, "copy", _lying_copy):
            status, lines = _doctor("-g", "3", "--json")
        report = json.loads("\n".join(lines))
        self.assertEqual(status, 1)
        wrong = {(pair["source"], pair["target"]): pair["wrong"] for pair in report["pairs"]}
        self.assertEqual(wrong, {(0, 1): 1, (0, 2): 0, (1, 0): 0, (1, 2): 0, (2, 0): 0, (2, 1): 1})
        found = [one["text"] for one in report["findings"] if one["severity"] == "wrong"]
        self.assertIn("copies from CPU:0 to CPU:1, CPU:2 to CPU:1 arrive corrupted", found)
        # Its sums come along the same edges.
        self.assertIn("tfcdo.ReductionToOneDevice sums are incorrect: 1 of 3072 elements", found)
        self.assertEqual(
            report["script"],
            "import tfcdo; strategy = tfcdo.MirroredStrategy(['CPU:0', 'CPU:2'], "
            "cross_device_ops=tfcdo.AutoAllReduce())",
        )

    @parameterized.parameters(
        ("{", "TF_CONFIG must be JSON"),
        ('{"cluster": {"worker": ["a:1"]}}', "which task of the cluster this process is"),
    )
    def test_a_wrong_tf_config(self, tf_config: str, named: str):
        with mock.patch.object(_InThisProcess, "ask", _no_tensorflow):
            status, lines = _doctor(tf_config=tf_config)
        (line,) = [line for line in lines if line.startswith("  wrong  ") and "TF_CONFIG" in line]
        self.assertIn(named, line)
        self.assertEqual(status, 1)

    def test_a_tensorflow_that_cannot_be_imported(self):
        with mock.patch.dict(sys.modules, tensorflow=None):
            status, lines = _doctor()
        text = "\n".join(lines)
        self.assertEqual(status, 1)
        self.assertEqual(lines[0], "This machine: 1 problem")
        self.assertIn("wrong  TensorFlow cannot be imported: ", text)
        self.assertEqual(lines[-1], "pip install 'tensorflow>=2.16'")

    def test_a_tensorflow_that_is_too_old(self):
        with mock.patch.object(tf, "__version__", "2.9.3"):
            status, lines = _doctor()
        self.assertEqual(status, 1)
        self.assertIn(
            "  wrong  TensorFlow 2.9.3 is older than 2.16, the oldest that tfcdo runs on", lines
        )
        self.assertEqual(lines[-1], "pip install --upgrade 'tensorflow>=2.16'")

    @parameterized.parameters("2.16.0", "2.16.0-rc1", "2.17.1", "3.0.0")
    def test_a_tensorflow_that_is_not_too_old(self, version: str):
        with mock.patch.object(tf, "__version__", version):
            self.assertEqual(probe.versions().problem, "")

    def test_a_tensorflow_that_lacks_a_private_name(self):
        with mock.patch.dict(sys.modules, {"tfcdo.tf_internals": None}):
            status, lines = _doctor()
        self.assertEqual(status, 1)
        self.assertIn(f"TensorFlow {tf.__version__} lacks something", "\n".join(lines))

    def test_an_answer_that_is_an_error(self):
        error = RuntimeError("no devices today\nand more")
        with mock.patch.object(self_test, "Patient", side_effect=error):
            status, lines = _doctor()
        self.assertEqual(status, 1)
        self.assertIn("  wrong  the devices cannot be used: RuntimeError: no devices today", lines)


class JsonTest(absltest.TestCase):
    def test_errors_stand_where_answers_would(self):
        with mock.patch.object(_InThisProcess, "ask", _mostly_errors):
            status, lines = _doctor("--json")
        report = json.loads("\n".join(lines))
        self.assertEqual(status, 1)
        self.assertEqual(report["all_reduces"], [{"error": "ValueError: a"}])
        self.assertEqual(report["topology"], {"error": "ended", "hangs": False})
        models = [{"model": name, "error": "b"} for name in ("mobilenet", "bert-base")]
        self.assertEqual(report["models"], models)
        hangs = {"source": 0, "target": 1, "error": "no end within 15 s", "hangs": True}
        self.assertEqual(report["pairs"], [hangs, {"source": 1, "target": 0, "error": "c"}])
        self.assertEqual(report["sums"]["tf.NcclAllReduce"], {"skipped": "no kernel"})
        summed = {"skipped": "", "elements": 8, "wrong": 0, "seconds": 0.5}
        self.assertEqual(report["sums"]["tfcdo.AutoAllReduce"], summed)


def _mostly_errors(self: Any, question: Mapping[str, Any], seconds: float) -> Any:
    """Answers as a probe would on a machine of which hardly anything can be found out."""
    if question["question"] == "topology":
        raise worker_pool.WorkerError("ended")
    if question.get("source") == 0:
        raise worker_pool.WorkerTimeoutError
    if question["question"] == "sum":
        if question["name"] != "tfcdo.AutoAllReduce":
            return {"skipped": "no kernel"}
        return {"skipped": "", "elements": 8, "wrong": 0, "seconds": 0.5}
    names = ["CPU:0", "CPU:1"]
    return {
        "versions": {"tfcdo": "1", "python": "3", "tensorflow": "2", "problem": "", "remedy": ""},
        "devices": {
            **{"physical": names, "logical": names, "examined": names, "description": "two"},
            **{"on_cpu": True, "gpus_of_nvidia_smi": []},
        },
        "all_reduces": {"error": "ValueError: a"},
        "auto": {"error": "b"},
        "pair": {"error": "c"},
    }[question["question"]]


def _no_tensorflow(self: Any, question: Mapping[str, Any], seconds: float) -> Any:
    del self, question, seconds
    return {"tfcdo": "1", "python": "3", "problem": "none here", "remedy": "install it"}


# A probe that answers at once, but hangs for one pair and ends for another.
_FAKE_PROBE = """
import os, time
from tfcdo.bench import worker_pool

asked = []

def answer(request):
    asked.append(request["question"])
    pair = request.get("source"), request.get("target")
    if pair == (0, 1):
        time.sleep(60)
    if pair == (1, 0):
        os.write(2, b"no such link")
        os._exit(7)
    return {"wrong": 0, "bandwidth": 1e9, "asked": asked}

worker_pool.serve(answer)
"""


class ProbesTest(absltest.TestCase):
    def test_a_probe_that_hangs_or_ends_is_replaced(self):
        limits = examination.Limits(start=30.0, pair=3.0)
        command = (sys.executable, "-c", _FAKE_PROBE)
        asked: list[list[str]] = []

        def ask(question: Mapping[str, Any], seconds: float) -> Any:
            answer = probes.ask(question, seconds)
            asked.append(answer["asked"])
            return answer

        with (
            mock.patch.object(examination.Probes, "_command", command),
            examination.Probes(2, limits) as probes,
        ):
            pairs = dict(examination._pairs(ask, 3, limits, lambda message: None))
        self.assertEqual(pairs.pop((0, 1)), answers.NoAnswer("no end within 3 s", hangs=True))
        # The new probe was asked for its devices first.
        self.assertEqual(asked[0], ["devices", "pair"])
        ended = pairs.pop((1, 0))
        assert isinstance(ended, answers.NoAnswer)
        self.assertFalse(ended.hangs)
        self.assertIn("ended with status 7", ended.error)
        self.assertIn("no such link", ended.error)
        others = [(0, 2), (1, 2), (2, 0), (2, 1)]
        self.assertEqual(pairs, dict.fromkeys(others, answers.Copies(0, 1e9)))

    def test_after_some_that_hang_the_rest_is_not_tried(self):
        def ask(question: Mapping[str, Any], seconds: float) -> Any:
            raise worker_pool.WorkerTimeoutError

        pairs = dict(examination._pairs(ask, 3, examination.Limits(), lambda message: None))
        hanging = answers.NoAnswer("no end within 15 s", hangs=True)
        skipped = answers.Skipped("3 others hang")
        self.assertEqual(list(pairs.values()), [hanging] * 3 + [skipped] * 3)

    def test_a_process_of_its_own(self):
        limits = examination.Limits()
        with (
            mock.patch.dict(os.environ, TF_CONFIG="{"),
            examination.Probes(3, limits) as probes,
        ):
            # Twice the same line: a probe that has been asked is not started again.
            versions = probes.ask({"question": "versions"}, limits.start)
            devices = probes.ask(examination.devices_question(3), limits.start)
            pair = {"question": "pair", "source": 2, "target": 0, "seconds": 0.0}
            copied = probes.ask(pair, limits.pair)
        self.assertEqual(versions["tensorflow"], tf.__version__)
        self.assertEqual(versions["problem"], "")
        self.assertLen(devices["examined"], 3)
        self.assertEqual(copied["wrong"], 0)


if __name__ == "__main__":
    tf.test.main()
