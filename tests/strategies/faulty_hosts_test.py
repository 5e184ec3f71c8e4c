"""Hosts that are slow, killed, asked or wrong, and tfcdo itself broken: all end, and say why."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import tempfile
import threading
import time
from concurrent import futures
from typing import Any
from unittest import mock

import clusters
import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfcdo
from tfcdo import strategies
from tfcdo.cluster import session
from tfcdo.doctor import blackbox

# What these faults show is a time-out; the others wait, however busy the machine is.
_TIMED_OUT = {"absent": 12.0, "sleeps": 12.0, "unlike keys": 12.0}


def _break(fault: str, here: bool) -> None:
    """Trains a little, without Keras."""
    timeout = _TIMED_OUT.get(fault, 100.0)
    if fault != "ends":
        # The machine may be so busy that a host that is well says nothing for ten seconds.
        mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout, bytes_per_pack=64
    )
    settings: dict[str, Any] = {}
    if fault == "another setting" and here:
        settings["cross_device_ops"] = tfcdo.HierarchicalCopyAllReduce()
    if fault == "absent" and here:
        return
    if fault == "late" and here:
        time.sleep(6.0)
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=2, **settings)
    print("started", flush=True)
    width = 33 if fault == "another shape" and here else 32
    with strategy.scope():
        variable = tf.Variable(tf.zeros([width]))
    if fault == "unlike keys" and here:
        keys = session.Session.next_keys
        replacement: Any = lambda *arguments: [key + 1 for key in keys(*arguments)]  # noqa: E731
        mock.patch.object(session.Session, "next_keys", replacement).start()

    @tf.function
    def train() -> None:
        def step() -> None:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
            gradient = tf.fill([width], replica + 1.0)
            variable.assign_add(context.all_reduce("SUM", gradient))

        strategy.run(step)

    for number in range(8):
        if here and number == 4:
            if fault == "ends":
                return
            if fault == "sleeps":
                time.sleep(2 * timeout)
        train()
    values = {float(element) for part in variable.values for element in part.numpy()}
    print("values", sorted(values), flush=True)


_STEPS = 24
# Seconds, late in each step, so that a host is named within 20. A busy machine also delays the
# other host: the longer the delay, the less that matters.
_DELAYS = (0.2, 0.4, 0.8, 1.6)


def _delay(fault: str, here: bool, steps_per_execution: str = "1", delay: str = "0") -> None:
    """Trains with Keras; prints what the strategy knows of delays."""
    if fault != "killed":
        # The machine may be so busy that a host that is well says nothing for ten seconds.
        mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=64)
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=1)
    x, y = np.random.default_rng(0).normal(size=(2, 2 * _STEPS, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2, drop_remainder=True)
    if fault == "data" and here:
        data = data.map(lambda inputs, targets: (_slept(inputs, float(delay)), targets))
    if fault in ("killed", "signal"):
        data = data.enumerate().map(lambda index, pair: _faulty(index, pair, fault, here))
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh") for _ in range(4)]
        if fault == "backward" and here:
            layers.insert(2, _SlowBackward(float(delay)))
        model = keras.Sequential([keras.layers.Input((8,)), *layers])
        model.compile("sgd", "mse", steps_per_execution=int(steps_per_execution))
    model.fit(data.with_options(sharding), verbose=0)
    print("delays", json.dumps([dataclasses.asdict(one) for one in strategy.host_delays()]))
    # The first host, which keeps the numbers, must not end before the others have read them.
    strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)


def _slept(value: tf.Tensor, seconds: float) -> tf.Tensor:
    def sleep(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


@keras.saving.register_keras_serializable()
class _SlowBackward(keras.layers.Layer):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def slow(value: tf.Tensor) -> tuple[tf.Tensor, object]:
            return tf.identity(value), lambda gradient: _slept(gradient, self._seconds)

        return slow(inputs)


def _faulty(index: tf.Tensor, pair: tuple[tf.Tensor, tf.Tensor], fault: str, here: bool) -> object:
    def happen(number: np.ndarray) -> np.ndarray:
        if number == 10 and fault == "signal":
            threading.Timer(4.0, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        if number == 10 and here:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10.0)
        return number

    number = tf.numpy_function(happen, [index], tf.int64)
    with tf.control_dependencies([number]):
        return [tf.ensure_shape(tf.identity(one), one.shape) for one in pair]


def main(fault: str, *arguments: str) -> None:
    """Trains as one host of a cluster; the fault happens on host 1."""
    here = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
    train: Any = _delay if fault in ("data", "backward", "killed", "signal") else _break
    train(fault, here, *arguments)


_TIMEOUT = 180.0
# 8 steps add 1 + 2 + 3 + 4, on 2 x 2 replicas.
_CORRECT = "values [80.0]"
_HOST_1 = r"host 1 \(/job:worker/task:1 at 127.0.0.1:\d+\)"


# What goes wrong on host 1, and what host 0 then says.
_FAULTS = {
    # `host_unlike` has all settings.
    "another setting": "not set up alike: cross_device_ops: .* on host 0 .* on host 1",
    "another shape": r"differ: values, element 0 of 1: float32\[3\d\] on host \d, float32\[3\d\]",
    "unlike keys": r"timed out: pack 1 of 2, time 1, of the all-reduce .* has waited 1\d s",
    "sleeps": r"timed out: pack . of 2, time 5, .* for " + _HOST_1 + ", which is busy or",
    "ends": _HOST_1 + " has come to the end of its program before others: all hosts must make",
    "absent": f"RendezvousError: timed out waiting for {_HOST_1} to start",
}


class BreakingTest(tf.test.TestCase):
    def test_all_end_with_the_reason(self):
        """One test, as each of pytest's processes would start all hosts."""
        # They mostly wait, so all wait at once.
        with futures.ThreadPoolExecutor(max_workers=6) as pool:
            runs = {
                fault: pool.submit(clusters.run, 2, __file__, [fault], _TIMEOUT)
                for fault in (*_FAULTS, "late")
            }
        for fault, run in runs.items():
            with self.subTest(fault):
                outcomes = run.result()
                for outcome in outcomes:
                    self.assertIsNotNone(outcome.returncode, f"it hangs: {outcome.output}")
                if fault in _FAULTS:
                    self.check_fault(_FAULTS[fault], *outcomes)
                    continue
                for outcome in outcomes:
                    self.assertEqual(0, outcome.returncode, outcome.output)
                    self.assertIn(_CORRECT, outcome.output)

    def check_fault(self, message, outcome, faulty):
        self.assertNotEqual(0, outcome.returncode, outcome.output)
        self.assertRegex(outcome.output.replace("\n", " "), message, faulty.output)
        self.assertNotIn("values [", faulty.output)


class SlowHostsTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        variables = mock.patch.dict("os.environ", {"TFCDO_CACHE_DIR": self.folder.name})
        variables.start()
        self.addCleanup(variables.stop)

    def boxes(self):
        files = sorted(pathlib.Path(self.folder.name).glob("blackbox/*.json"))
        return blackbox.read(files) if files else []

    @parameterized.parameters(("data", 1), ("backward", 4))
    def test_a_slow_host_is_named(self, fault, steps_per_execution):
        pattern = _HOST_1 + r" enters \d+ ms after the others in (\d+) of (\d+) steps: \d+ % of a"
        for delay in _DELAYS:
            arguments = [fault, str(steps_per_execution), str(delay)]
            outcomes = clusters.run(2, __file__, arguments, _TIMEOUT)
            if re.search(pattern, outcomes[0].output):
                break
        for outcome in outcomes:
            self.assertEqual(0, outcome.returncode, outcome.output)
            [line] = re.findall("^delays (.*)$", outcome.output, re.MULTILINE)
            fast, slow = json.loads(line)
            self.assertEqual((0, 1), (fast["host"], slow["host"]))
            # Wide limits: a busy machine delays both hosts.
            self.assertLess(fast["seconds"], 0.5 * slow["seconds"])
            self.assertGreaterEqual(slow["late_steps"], 0.5 * slow["steps"])
            self.assertGreater(slow["step_seconds"], slow["seconds"])
        chief, other = outcomes
        self.assertLen(re.findall(pattern, chief.output), 1, chief.output)
        self.assertNotIn("after the others", other.output)
        self.assertEmpty(self.boxes())

    def test_sigusr1_writes_black_boxes_while_hosts_wait(self):
        outcomes = clusters.run(2, __file__, ["signal"], _TIMEOUT)
        for outcome in outcomes:
            self.assertEqual(0, outcome.returncode, outcome.output)
            # One late step is no slow host.
            self.assertNotIn("after the others", outcome.output)
        boxes = self.boxes()
        self.assertEqual([(0, "SIGUSR1"), (1, "SIGUSR1")], [(b.host, b.reason) for b in boxes])
        # It waits in the first collective of a step, in which hosts ask each other for data.
        self.check_stopped_before(boxes, r"time 1[1-4], of the all-reduce of 1 value \(int64.*")

    def test_a_killed_host_is_named_by_the_black_box_of_the_other(self):
        alive, killed = clusters.run(2, __file__, ["killed"], _TIMEOUT)
        self.assertNotIn(alive.returncode, (0, None), alive.output)
        self.assertNotIn(killed.returncode, (0, None), killed.output)
        [box] = self.boxes()
        self.assertEqual(0, box.host)
        self.assertIn("UnavailableError", box.reason)
        self.assertRegex(blackbox.compare([box])[1], f"^{_HOST_1}: no file: it was killed")
        # It fetches data ahead of time, so the step in which it is killed is not known.
        self.check_stopped_before([box], r"time \d+, of the all-reduce of .*")

    def check_stopped_before(self, boxes, where):
        """Asserts that host 0 waits in a collective that host 1 did not come to."""
        *_, verdict = blackbox.compare(boxes)
        pattern = (
            rf"^Host 0 waited in pack \d of \d+, {where}, plan \w{{8}}: Host 1 stopped before it\.$"
        )
        self.assertRegex(verdict, pattern, "\n".join(blackbox.compare(boxes)))


if __name__ == "__main__":
    tf.test.main()
