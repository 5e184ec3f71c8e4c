"""Hosts that are slow, killed, asked or wrong, and tfcdo itself broken: all end, and say why."""

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

import tfcdo
from tfcdo import strategies, tf_internals
from tfcdo.cluster import session
from tfcdo.doctor import blackbox

# What these faults show is a time-out; the others wait, however busy the machine is.
_TIMED_OUT = {"absent": 12.0, "sleeps": 12.0, "unlike keys": 12.0}


def _break(fault: str, here: bool) -> None:
    timeout = _TIMED_OUT.get(fault, 100.0)
    if fault != "ends":
        # The machine may be so busy that a host that is well says nothing for ten seconds.
        mock.patch.object(strategies, "_HEARTBEAT_SECONDS", 100.0).start()
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=timeout, bytes_per_pack=64
    )
    if fault == "absent" and here:
        return
    if fault == "ends early":  # It has met the others; TensorFlow's servers have not started.
        mock.patch.object(strategies, "_SERVER_START_SECONDS", 3.0).start()
        if here:
            leave: Any = lambda **_: os._exit(0)  # noqa: E731
            mock.patch.object(tf_internals, "configure_coordination", leave).start()
    strategy = tfcdo.MultiWorkerMirroredStrategy(None, options, devices_per_worker=2)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([32]))
    if fault == "unlike keys" and here:
        keys = session.Session.next_keys
        replacement: Any = lambda *arguments: [key + 1 for key in keys(*arguments)]  # noqa: E731
        mock.patch.object(session.Session, "next_keys", replacement).start()

    @tf.function
    def train() -> None:
        def step() -> None:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
            variable.assign_add(context.all_reduce("SUM", tf.fill([32], replica + 1.0)))

        strategy.run(step)

    for number in range(8):
        if here and number == 4:
            if fault == "ends":
                return
            if fault == "sleeps":
                time.sleep(1.5 * timeout)
        train()
    print("trained", flush=True)


_STEPS = 24
# Seconds, late in each step. A busy machine also delays the other host: longer ones show.
_DELAYS = (0.2, 0.4, 0.8, 1.6)


def _delay(fault: str, here: bool, folder: str, delay: str = "0") -> None:
    """Trains with Keras; prints what the strategy knows of delays."""
    os.environ["TFCDO_CACHE_DIR"] = folder
    if fault != "killed":
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
        layers = [keras.layers.Input((8,)), keras.layers.Dense(8)]
        if fault == "step":  # It comes in time to the collective that asks for data.
            late = here * float(delay)
            layers.insert(1, keras.layers.Lambda(lambda inputs: _slept(inputs, late), (8,)))
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", steps_per_execution=4 if fault == "step" else 1)
    model.fit(data.with_options(sharding), verbose=0)
    print("delays", json.dumps([dataclasses.asdict(one) for one in strategy.host_delays()]))
    # The first host, which keeps the numbers, must not end before the others have read them.
    strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)


def _slept(value: tf.Tensor, seconds: float) -> tf.Tensor:
    def sleep(array: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return array

    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


def _faulty(index: tf.Tensor, pair: tuple[tf.Tensor, tf.Tensor], fault: str, here: bool) -> object:
    def happen(number: np.ndarray) -> np.ndarray:
        if number == 10 and fault == "signal":
            threading.Timer(4.0, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        if number == 10 and here:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10.0)
        return number

    with tf.control_dependencies([tf.numpy_function(happen, [index], tf.int64)]):
        return [tf.ensure_shape(tf.identity(one), one.shape) for one in pair]


def main(fault: str, *arguments: str) -> None:
    """Trains as one host of a cluster; the fault happens on host 1."""
    train: Any = _delay if arguments else _break
    train(fault, json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1, *arguments)


_TIMEOUT = 180.0
_HOST_1 = r"host 1 \(/job:worker/task:1 at 127.0.0.1:\d+\)"
_NAMED = _HOST_1 + r" enters \d+ ms after the others in (\d+) of (\d+) steps: \d+ % of a"
_FAULTS = {
    "unlike keys": r"timed out: pack 1 of 2, time 1, of the all-reduce .* has waited 1\d s",
    "sleeps": r"timed out: pack . of 2, time 5, .* for " + _HOST_1 + ", which is busy or",
    "ends": _HOST_1 + " has come to the end of its program before others: all hosts must make",
    "ends early": "DeadlineExceededError: .*/job:worker/replica:0/task:1",
    "absent": f"RendezvousError: timed out waiting for {_HOST_1} to start",
}


class FaultsTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def boxes(self, fault):
        files = sorted(self.folder.glob(f"{fault}/blackbox/*.json"))
        return blackbox.read(files) if files else []

    def test_all_end_with_the_reason(self):
        # They mostly wait, so all wait at once.
        given = {fault: [fault] for fault in _FAULTS}
        given |= {fault: [fault, str(self.folder / fault)] for fault in ("signal", "killed")}
        with futures.ThreadPoolExecutor(len(given)) as pool:
            runs = {
                fault: pool.submit(clusters.run, 2, __file__, arguments, _TIMEOUT)
                for fault, arguments in given.items()
            }
        for fault, run in runs.items():
            with self.subTest(fault):
                first, other = run.result()
                for outcome in (first, other):
                    self.assertIsNotNone(outcome.returncode, f"it hangs: {outcome.output}")
                check = {"signal": self.check_signal, "killed": self.check_killed}.get(fault)
                if check:
                    check(first, other)
                    continue
                self.assertNotEqual(0, first.returncode, first.output)
                self.assertRegex(first.output.replace("\n", " "), _FAULTS[fault], other.output)
                self.assertNotIn("trained", other.output)

    def check_signal(self, *outcomes):
        for outcome in outcomes:
            self.assertEqual(0, outcome.returncode, outcome.output)
            self.assertNotIn("after the others", outcome.output)
        boxes = self.boxes("signal")
        self.assertEqual([(0, "SIGUSR1"), (1, "SIGUSR1")], [(b.host, b.reason) for b in boxes])
        # It waits in the first collective of a step, in which hosts ask each other for data.
        self.check_stopped_before(boxes, r"time 1[1-4], of the all-reduce of 1 value \(int64.*")

    def check_killed(self, alive, killed):
        self.assertNotEqual(0, alive.returncode, alive.output)
        self.assertNotEqual(0, killed.returncode, killed.output)
        [box] = self.boxes("killed")
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

    def test_slow_hosts_are_named(self):
        faults = ("data", "step")
        with futures.ThreadPoolExecutor(len(faults)) as pool:
            runs = dict(zip(faults, pool.map(self.until_named, faults), strict=True))
        for fault, (chief, other) in runs.items():
            with self.subTest(fault):
                for outcome in (chief, other):
                    self.assertEqual(0, outcome.returncode, outcome.output)
                    [line] = re.findall("^delays (.*)$", outcome.output, re.MULTILINE)
                    fast, slow = json.loads(line)
                    self.assertEqual((0, 1), (fast["host"], slow["host"]))
                    # Wide limits: a busy machine delays both hosts.
                    self.assertLess(fast["seconds"], 0.5 * slow["seconds"])
                    self.assertGreaterEqual(slow["late_steps"], 0.5 * slow["steps"])
                    self.assertGreater(slow["step_seconds"], slow["seconds"])
                self.assertLen(re.findall(_NAMED, chief.output), 1, chief.output)
                self.assertNotIn("after the others", other.output)
                self.assertEmpty(self.boxes(fault))

    def until_named(self, fault):
        for delay in _DELAYS:
            arguments = [fault, str(self.folder / fault), str(delay)]
            outcomes = clusters.run(2, __file__, arguments, _TIMEOUT)
            if re.search(_NAMED, outcomes[0].output):
                break
        return outcomes


if __name__ == "__main__":
    tf.test.main()
