"""Tests of what a process is told about its cluster, and what it says of mistakes there."""

import json
import math
import os
from unittest import mock

from absl.testing import absltest, parameterized

from tfcdo.cluster import config, protocol

TWO = {"worker": ["a:1", "b:2"]}


class FromSpecTest(parameterized.TestCase):
    def test_the_chief_comes_first(self):
        spec = {"worker": ["b:2", "c:3"], "chief": ["a:1"], "ps": ["p:9"], "evaluator": ["e:5"]}
        cluster, chief = config.from_spec(spec, "worker", 1), config.from_spec(spec, "chief", 0)
        assert cluster and chief
        self.assertEqual(["a:1", "b:2", "c:3"], [task.address for task in cluster.tasks])
        self.assertEqual((2, (0, 1)), (cluster.index, cluster.others))
        self.assertFalse(cluster.is_chief)
        self.assertTrue(chief.is_chief)
        self.assertEqual("host 1 (/job:worker/task:0 at b:2)", cluster.name(1))
        self.assertEqual("/job:worker/replica:0/task:1", cluster.tasks[2].device_prefix)

    @parameterized.parameters(
        ({}, None, None, None),
        ({**TWO, "evaluator": ["e:1"]}, "evaluator", 0, None),
        ({"worker": ["a:1"], "evaluator": ["e:1"]}, "worker", 0, ["a:1"]),
    )
    def test_alone(self, spec, job, index, addresses):
        cluster = config.from_spec(spec, job, index)
        self.assertEqual(addresses, cluster and [task.address for task in cluster.tasks])

    @parameterized.parameters(
        (TWO, None, None, "must say which task"),
        (TWO, "chief", 0, r"one of \['worker'\]; got 'chief'"),
        (TWO, "worker", 2, "one of the 2 of job 'worker', 0 to 1; got 2"),
        (TWO, "worker", -1, "got -1"),
        (TWO, "worker", "0", "0 to 1; got '0'"),
        (TWO, "worker", True, "0 to 1; got True"),
        ({"ps": ["a:1"]}, "ps", 0, "to train; got 'ps'"),
        ({"worker": ["a:1"], "ps": ["b:1"]}, "worker", 0, r"no other jobs, .*; got \['ps'\]"),
        (TWO, "evaluator", 0, "got 'evaluator' .an evaluator needs its address, or no TF_CONFIG"),
        ({**TWO, "evaluator": ["e:1"]}, "evaluator", 1, "one of the 1 of job 'evaluator', 0 to 0"),
        ({"chief": ["a:1", "b:1"]}, "chief", 0, "at most one chief"),
        ({"worker": ["a:1", "a:1"]}, "worker", 0, "a:1 is duplicated"),
        ({"worker": ["a:1", "a"]}, "worker", 0, "'host:port' with a port .*; got 'a'"),
        ({"worker": ["a:1?x"]}, "worker", 0, "'host:port' with a port .*; got 'a:1.x'"),
    )
    def test_mistakes(self, spec, job, index, message):
        self.assertRaisesRegex(ValueError, message, config.from_spec, spec, job, index)


class TfConfigTest(parameterized.TestCase):
    def read(self, text: str) -> config.Cluster | None:
        with mock.patch.dict(os.environ, {"TF_CONFIG": text}):
            return config.from_tf_config()

    def test_valid(self):
        self.assertEqual([None] * 3, [self.read(text) for text in ("", " ", "{}")])
        cluster = self.read(json.dumps({"cluster": TWO, "task": {"type": "worker", "index": "1"}}))
        self.assertEqual(1, cluster and cluster.index)
        self.assertEqual(("::1", 2222), config.split_address("[::1]:2222"))

    @parameterized.parameters(
        ("{'cluster': 1}", "TF_CONFIG must be JSON with 'cluster' .* got .*malformed"),
        ("[1]", "Expected `object`, got `array`$"),
        ('{"cluster": ["a:1"]}', "Expected `object`, got `array` - at `..cluster`"),
        ('{"cluster": {"worker": "a:1"}}', "Expected `array`, got `str` - at `..cluster"),
        ('{"cluster": {"worker": [1]}}', "Expected `str`, got `int` - at `..cluster"),
        ('{"cluster": {"worker": []}}', "Expected `array` of length >= 1 - at `..cluster"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": "x"}}', "`int . null`, got `str`"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "got 1"),
    )
    def test_mistakes(self, text, message):
        self.assertRaisesRegex(ValueError, message, self.read, text)

    @parameterized.parameters("a", "a:", ":1", "a:0", "a:65536", "a:b", "a:1/x", "u@a:1", 5, None)
    def test_no_address(self, address):
        with self.assertRaisesRegex(ValueError, "an address in a cluster must be 'host:port'"):
            config.split_address(address)


class DifferenceTest(absltest.TestCase):
    def test_names_the_first_differences(self):
        left = {"a": 1, "b": [1, 2], "c": [1], "d": 5, "same": 0, "only one": 7}
        right = {"a": 2, "b": [1, 3], "c": [], "d": 6, "same": 0, "only another": 8}
        told = protocol.differences(left, "x", right, "y")
        first = "a: 1 on x, 2 on y; b, element 1 of 2: 2 on x, 3 on y; c: 1 on x, 0 on y"
        self.assertEqual(f"{first}; and 1 more", told)
        with_tuple = {"a": [{"b": math.nan}, 1], "c": (1,)}
        told = protocol.differences(with_tuple, "x", {"a": [{"b": math.nan}, 1.0], "c": [1]}, "y")
        self.assertEqual("a, element 1 of 2: 1 on x, 1.0 on y", told)
        told = protocol.differences({"a": 1}, "x", {"a": 1, "e": 6}, "y")
        self.assertEqual("e: nothing on x, 6 on y", told)


if __name__ == "__main__":
    absltest.main()
