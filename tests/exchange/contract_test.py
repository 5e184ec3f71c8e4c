"""The contract of exchanges, for all of tfcdo's and the documentation's, on simulated hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from exchange_cases import CASES, STEPS, Case, given, numbers, shapes_for
from wire_bounds import block_error_bound, error_bound

from tfcdo.exchange import Blocks, Cast, DiLoCo, Exchange, PowerSGD, Rehearsal, Sum, TopK, rounding
from tfcdo.exchange.casts import BY_NAME

_REHEARSED: dict[str, Any] = {"exchange": BY_NAME["int8"], "shapes": []}

_TINY = 2.0**-124  # Kernels take float32 that are not normal for 0.


def _values(exchange: Exchange, hosts: int, step: int, dtype: str) -> list[list[np.ndarray]]:
    return [given(exchange, numbers(host, step, dtype)) for host in range(hosts)]


def _exact(values: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    return [np.asarray(np.sum(each, 0, np.float64)) for each in zip(*values, strict=True)]


class ContractTest(tf.test.TestCase, parameterized.TestCase):
    def rehearse(self, name: str, hosts: int, dtype: str = "float32") -> tuple[Case, Rehearsal]:
        case = CASES[name]
        return case, Rehearsal(case.exchange, shapes_for(case.exchange), hosts, dtype)

    def check_that_nothing_is_lost(
        self, case: Case, rehearsal: Rehearsal, steps: Sequence[Any], results: Sequence[Any]
    ) -> None:
        if case.is_late:
            return
        roundoff = 2.0**-20 if steps[0][0][0].dtype == np.float32 else 2.0**-49
        exact = [np.sum(each, 0) for each in zip(*map(_exact, steps), strict=True)]
        for index, wanted in enumerate(exact):
            total = np.sum([sums[index] for sums in results], 0, np.float64)
            for state in rehearsal.states:
                for key in case.keeps:
                    kept = state.get(key, state.get(f"{key}{index}", 0.0))
                    total = total + np.reshape(kept, np.shape(total) if np.ndim(kept) else ())
            # The errors of the last step's casts are missing: no more than in one step.
            largest = max(np.max(np.abs(own[index])) for values in steps for own in values)
            bound = len(steps) * rehearsal.hosts * 4 * roundoff
            if not case.keeps:
                bound += 2 * case.relative * rehearsal.hosts
            self.assertLessEqual(np.max(np.abs(total - wanted)), bound * largest + _TINY)

    @parameterized.product(name=tuple(CASES), cluster=((2, "float64"), (3, "float32")))
    def test_within_the_bound_alike_on_all_hosts_and_nothing_is_lost(self, name, cluster):
        hosts, dtype = cluster
        case, rehearsal = self.rehearse(name, *cluster)
        first, second = rehearsal.states[:2]
        np.testing.assert_equal(first, second)  # Hosts begin alike.
        steps = [_values(case.exchange, hosts, step, dtype) for step in range(STEPS)]
        results = [rehearsal.step(values) for values in steps]
        errors = [np.max(np.abs(a - b)) for a, b in zip(results[0], _exact(steps[0]), strict=True)]
        largest = sum(max(np.max(np.abs(each)) for each in own) for own in steps[0])
        self.assertLessEqual(max(errors), case.relative * largest)
        if case.relative > 2.0**-20:  # Something is left out.
            self.assertGreater(max(errors), 1e-4 * largest)
        self.check_that_nothing_is_lost(case, rehearsal, steps, results)

    @parameterized.parameters(*CASES)
    def test_not_a_number_and_infinity_arrive_and_spoil_no_later_step(self, name):
        case, rehearsal = self.rehearse(name, 2)
        exchange = case.exchange
        rehearsal.step(_values(exchange, 2, 0, "float32"))
        for number in (np.nan, -np.inf):
            values = numbers(0, 1)
            values[0][3:6] = number  # More than TopK sends.
            sums = rehearsal.step([given(exchange, values), given(exchange, numbers(1, 1))])
            self.assertFalse(all(np.all(np.isfinite(total)) for total in sums))
            for state in rehearsal.states:
                self.assertTrue(all(np.all(np.isfinite(kept)) for kept in state.values()))
        for total in rehearsal.step(_values(exchange, 2, 2, "float32")):
            self.assertTrue(np.all(np.isfinite(total)))

    @parameterized.product(name=tuple(CASES), special=((0.0, 1e-42), (1e18, 1e18)))
    def test_zeros_tiny_and_large_values(self, name, special):
        """They are as exact as others, and nothing of the steps after them is lost."""
        case, rehearsal = self.rehearse(name, 2)
        steps = [_values(case.exchange, 2, step, "float32") for step in range(5)]
        for step, number in enumerate(special):
            steps[step] = [[np.full_like(each, number) for each in own] for own in steps[step]]
        results = [rehearsal.step(values) for values in steps]
        for sums, number in zip(results, special):
            # Twice what a step leaves out: its own, and what the steps before it have left out.
            bound = 2 * max(case.relative, 2.0**-18) * 2 * number + _TINY
            for total in sums:
                self.assertAllLessEqual(np.abs(total - 2.0 * np.float32(number)), bound)
        self.check_that_nothing_is_lost(case, rehearsal, steps, results)


@dataclasses.dataclass(frozen=True)
class _Wrong(Sum):
    way: Callable[[Any, Any], Any]

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Any
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        result = self.way(tensors[0], peers)
        return result if isinstance(result, tuple) else ([result], {})


class BrokenTest(parameterized.TestCase):
    @parameterized.parameters(
        ("leaves out", lambda flat, peers: flat),
        ("leaves out|waits", lambda flat, peers: peers.all_reduce(flat) if peers.rank else flat),
        ("call 0 .* is .*broadcast.*cost has .*all_reduce", lambda flat, p: p.broadcast(flat)),
        ("num_bytes=36.*cost has .*num_bytes=40", lambda flat, p: p.all_reduce(flat[:-1])),
        ("call 1 of .* cost has None", lambda flat, p: p.all_reduce(p.all_reduce(flat))),
        (
            r"run must return sums of \['float32'\] and \[TensorShape\(\[10\]\)\]",
            lambda flat, peers: peers.all_reduce(flat)[:-1],
        ),
        ("returns .*float64", lambda flat, p: tf.cast(p.all_reduce(flat), tf.float64)),
        ("must return a state like", lambda flat, p: ([p.all_reduce(flat)], {"more": flat})),
        ("sum 0 differs between hosts 0 and 1", lambda flat, p: p.all_reduce(flat) + float(p.rank)),
    )
    def test_it_is_refused(self, pattern, way):
        with self.assertRaisesRegex(RuntimeError, pattern):
            Rehearsal(_Wrong(way), [(10,)]).step([[np.ones(10, np.float32)]] * 2)

    def test_other_numbers_of_hosts_are_refused(self):
        for count in (1, 3):
            with self.assertRaisesRegex(ValueError, f"each of the 2 hosts; got {count}"):
                Rehearsal(Cast("bfloat16"), [(10,)]).step([[np.ones(10, np.float32)]] * count)

    def test_other_shapes_are_refused(self):
        with self.assertRaisesRegex(ValueError, r"values\[1\] .* \(\(3,\),\); got \(\(2,\),\)"):
            Rehearsal(Sum(), [(3,)]).step([[np.ones(3)], [np.ones(2)]])

    @parameterized.parameters(
        ("rank must be at least 1; got 0", PowerSGD, {"rank": 0}),
        ("fraction must be above 0 and at most 1; got 2", TopK, {"fraction": 2}),
        ("fraction must be a number; got '1'", TopK, {"fraction": "1"}),
        ("error_feedback must be True .* got 1", TopK, {"fraction": 1, "error_feedback": 1}),
        ("dtype must be 'bfloat16' or 'float16'; got 'int8'", Cast, {"dtype": "int8"}),
        ("dtype must be 'int8'; got 'float16'", Blocks, {"dtype": "float16"}),
        ("block must be at least 2; got 1", Blocks, {"block": 1}),
        ("must divide every, 50; got fragments=4", DiLoCo, {"every": 50, "fragments": 4}),
        ("must be a function that makes a Keras", DiLoCo, {"every": 50, "optimizer": 0.7}),
        ("exchange must be an object .*'int8'", Rehearsal, {**_REHEARSED, "exchange": "int8"}),
        ("shapes must be a list .* got .3,", Rehearsal, {**_REHEARSED, "shapes": (3,)}),
        ("dtype must be 'float32' or .* got 'no'", Rehearsal, {**_REHEARSED, "dtype": "no"}),
    )
    def test_arguments(self, pattern, make, arguments):
        with self.assertRaisesRegex((ValueError, TypeError), pattern):
            make(**arguments)


class CastsTest(tf.test.TestCase, parameterized.TestCase):
    def step(self, hosts: Rehearsal, values: Any) -> np.ndarray:
        [total] = hosts.step([[own] for own in values])
        return total

    @parameterized.parameters(
        # Numbers of hosts, and sizes: aligned and not, smaller than a block, and larger.
        ("bfloat16", 3, 7, "float32"), ("float16", 3, 129, "float64"), ("int8", 2, 160, "float32"),
        ("int8", 3, 7, "float32"), ("float16", 5, 1024, "float32"),
        # Tiny and huge blocks, of which a block beside them changes nothing.
        *[("int8", 3, 1024, "float32", magnitude) for magnitude in (1e-45, 1.2e-38, 1e38)],
    )  # fmt: skip
    def test_within_the_bound(self, wire, count, size, dtype, magnitude=1.0):
        values = np.random.default_rng(count).uniform(-1, 1, (count, size))
        values[:, : size // 2] *= magnitude
        values = values.astype(dtype)
        hosts = Rehearsal(BY_NAME[wire], [(size,)], count, dtype)
        if wire == "int8":
            _, block = BY_NAME[wire].layout(size, count)
            bound = block_error_bound(values, count, block)
        else:
            magnitudes = np.sum(np.abs(values), 0)
            bound = error_bound(magnitudes, 1, count, wire, tf.as_dtype(dtype))
        error = np.abs(self.step(hosts, values) - np.sum(values, 0, np.float64)) / bound
        self.assertLessEqual(np.max(error), 1)
        # It is cast, and the bound is not far away.
        self.assertGreater(np.max(error), 0.1)

    @parameterized.parameters(np.nan, -np.inf)
    def test_int8_of_a_block_that_is_not_finite(self, number):
        values = np.ones((2, 4096), np.float32)
        values[1, 2500] = number
        result = self.step(Rehearsal(BY_NAME["int8"], [(4096,)]), values)
        spoiled = np.arange(4096) // 256 == 2500 // 256
        self.assertAllEqual(np.isnan(result), spoiled)
        self.assertAllClose(result[~spoiled], np.full(4096 - 256, 2.0), rtol=1e-2)

    @parameterized.parameters(("bfloat16", 256.0), ("float16", 2048.0))
    def test_small_terms_are_not_swallowed(self, wire, large):
        """Added in 16 bits, a sum of this size stays what it is when 1 is added."""
        values = [np.full([9], one, np.float32) for one in (large, 1.0, 1.0, 1.0, 1.0)]
        total = self.step(Rehearsal(BY_NAME[wire], [(9,)], 5), values)
        self.assertAllEqual(np.full([9], large + 4.0), total)

    @parameterized.parameters(("float16", 300), ("int8", 300), ("int8", 1))
    def test_what_casts_lose_comes_in_later_steps(self, wire, size):
        """Over all steps only what the last one has lost is missing, of both casts."""
        values = np.random.default_rng(1).normal(size=(3, size)).astype(np.float32)
        steps = 8
        exact = steps * np.sum(values, 0, np.float64)
        # Equal steps, so that without feedback each loses the same.
        lost = {}
        for fed_back in (True, False):
            exchange = dataclasses.replace(BY_NAME[wire], error_feedback=fed_back)
            hosts = Rehearsal(exchange, [(size,)], 3)
            total = np.sum([self.step(hosts, values) for _ in range(steps)], 0, np.float64)
            lost[fed_back] = np.max(np.abs(total - exact))
        roundoff = rounding.ROUNDOFF[wire]
        largest = np.max(np.abs(values), 1).sum()
        # Residuals of both casts, and float32's own rounding.
        bound = 2 * roundoff / (1 - roundoff) ** 2 * largest + steps * 2.0**-22 * largest
        self.assertLessEqual(lost[True], bound)
        if size > 1:
            self.assertGreater(lost[False], bound)

    def test_a_step_that_is_not_finite_leaves_the_errors(self):
        hosts = Rehearsal(Blocks(error_feedback=True), [(600,)])
        self.step(hosts, np.random.default_rng(3).normal(size=(2, 600)).astype(np.float32))
        before = [dict(state) for state in hosts.states]
        self.step(hosts, np.full((2, 600), np.nan, np.float32))
        for one, other in zip(before, hosts.states, strict=True):
            for name, kept in one.items():
                self.assertGreater(np.max(np.abs(kept)), 0)
                self.assertAllEqual(kept, other[name])


class CompressionTest(tf.test.TestCase):
    def test_it_finds_the_largest_directions(self):
        """Without feedback, it comes near the best approximation, which an SVD gives."""
        generator = np.random.default_rng(1)
        left, right = generator.normal(size=(60, 3)), generator.normal(size=(3, 80))
        matrices = generator.normal(size=(2, 60, 80)) + 40 * left @ right
        rehearsal = Rehearsal(PowerSGD(3, error_feedback=False), [(60, 80)], 2, "float64")
        for _ in range(8):
            [total] = rehearsal.step([[matrix] for matrix in matrices])
        left, sizes, right = np.linalg.svd(matrices.sum(0))
        best = left[:, :3] * sizes[:3] @ right[:3]
        self.assertAllClose(total, best, rtol=0, atol=1e-6 * sizes[0])

    def test_exact_steps_at_the_beginning(self):
        exchange = PowerSGD(2, start_step=2)
        rehearsal = Rehearsal(exchange, shapes_for(exchange), 2)
        for step in range(4):
            values = _values(exchange, 2, step, "float32")
            [total, *_], [wanted, *_] = rehearsal.step(values), _exact(values)
            self.assertEqual(np.max(np.abs(total - wanted)) < 1e-5, step < 2)
            self.assertEqual([state["step"] for state in rehearsal.states], [step + 1] * 2)

    def test_the_largest_are_sent_and_the_rest_waits(self):
        rehearsal = Rehearsal(TopK(0.2), [(10,)], 2, "float64")
        first = np.array([0, 0, 5, 0, 0, -7, 1, 0, 0, 0.0])
        [total] = rehearsal.step([[first], [np.array([1, 0, 0, 0, 0, 9, 3, 0, 0, 0.0])]])
        self.assertAllEqual(total, [0, 0, 5, 0, 0, 2, 3, 0, 0, 0])
        [total] = rehearsal.step([[np.zeros(10)], [np.zeros(10)]])
        self.assertAllEqual(total, [1, 0, 0, 0, 0, 0, 1, 0, 0, 0])


if __name__ == "__main__":
    tf.test.main()
