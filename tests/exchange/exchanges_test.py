"""Exchanges, all of tfcdo's and the documentation's: rehearsed, and between processes."""

import dataclasses
import functools
import pathlib
import re
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import Any

import clusters
import keras
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import parameterized
from clusters import other_strategy, weights
from wire_bounds import block_error_bound, error_bound

import tfcdo
from tfcdo.exchange import Blocks, Cast, DiLoCo, Exchange, PowerSGD, Rehearsal, Sum, TopK, rounding
from tfcdo.exchange.casts import BY_NAME
from tfcdo.exchange.protocol import calls_of
from tfcdo.execute import between
from tfcdo.execute.interpreter import recently_planned
from tfcdo.training import diloco

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own-exchange.md"
_NAMES: dict[str, Any] = {"__name__": "own_exchange"}
_BLOCKS = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
exec(compile(_BLOCKS[0], _PAGE.name, "exec", dont_inherit=True), _NAMES)


@dataclasses.dataclass(frozen=True)
class Case:
    exchange: Exchange
    relative: float  # Error of a sum, a part of the sum over hosts of the largest magnitudes.
    keeps: tuple[str, ...] = ()  # State that holds, in the values' shape, all that is not sent.
    devices: int = 2  # A host's, where hosts are processes.
    is_late: bool = False  # Its first two steps are exact.


CASES = {
    "Sum": Case(Sum(), 2.0**-22),
    "Cast": Case(Cast("bfloat16", True), 2.01 * 2.0**-8, devices=1),
    "Blocks": Case(Blocks(error_feedback=True), 2.01 / 254),
    "PowerSGD": Case(PowerSGD(2), 1.5, ("error",)),
    "PowerSGD late": Case(PowerSGD(2, start_step=2), 2.0**-22, devices=1, is_late=True),
    "TopK": Case(TopK(0.01), 1.0, ("error",), devices=1),
    "Gathered": Case(_NAMES["Gathered"](), 2.0**-8 + 2.0**-22, ("error",)),
}
# A matrix, a kernel, vectors, and a matrix that PowerSGD sends as it is.
SHAPES = ((64, 48), (48,), (3, 3, 8, 24), (700,), (4, 5))
STEPS = 8


def shapes_for(
    exchange: Exchange, order: Sequence[int] = range(len(SHAPES))
) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the tensors that an exchange gets for a pack of all values."""
    if exchange.whole_values:
        return tuple(SHAPES[index] for index in order)
    return ((sum(int(np.prod(shape)) for shape in SHAPES),),)


def numbers(replica: int, step: int, dtype: str = "float32") -> list[np.ndarray]:
    draw = np.random.default_rng([replica, step])
    return [draw.normal(size=shape).astype(dtype) for shape in SHAPES]


def given(
    exchange: Exchange, values: Sequence[np.ndarray], order: Sequence[int] = range(len(SHAPES))
) -> list[np.ndarray]:
    values = [values[index] for index in order]
    return values if exchange.whole_values else [np.concatenate([np.ravel(v) for v in values])]


_REHEARSED: dict[str, Any] = {"exchange": BY_NAME["int8"], "shapes": [(3,)]}
_COSTS_40 = {"exchange": types.SimpleNamespace(cost=lambda *_: 40), "pack": None, "hosts": 2}
_STEP = Rehearsal(Sum(), [(3,)]).step
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
        if case.is_late:
            errors = [np.max(np.abs(r[0] - _exact(s)[0])) for r, s in zip(results, steps)]
            self.assertEqual([error < 1e-5 for error in errors], [True] * 2 + [False] * (STEPS - 2))
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
        before = [dict(state) for state in rehearsal.states]
        rehearsal.step([given(exchange, [np.full(shape, np.nan) for shape in SHAPES])] * 2)
        for one, other in zip(before, rehearsal.states, strict=True):
            self.assertTrue(case.is_late or all(map(np.any, one.values())))
            np.testing.assert_equal({**one, "step": 0}, {**other, "step": 0})
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
    way: Any  # A function of a tensor and the peers.

    def state(self, pack: Any, hosts: int) -> Mapping[str, Any]:
        return {"kept": np.float32(0)} if self.way else None  # type: ignore[return-value]

    def run(
        self, tensors: Sequence[Any], state: Mapping[str, Any], peers: Any
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        result = self.way(tensors[0], peers)
        return result if isinstance(result, tuple) else ([result], state)


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
        ("must return a state like", lambda flat, p: ([p.all_reduce(flat)], {"kept": flat})),
        ("a finite state", lambda flat, p: ([p.all_reduce(flat)], {"kept": np.nan * flat[0]})),
        ("a state like .*kept.*, in a dict; .*None", lambda flat, p: ([p.all_reduce(flat)], None)),
        (r"returns \(\[array", lambda flat, p: p.all_reduce(flat).numpy()),
        ("a row for each of the 2 hosts; got .*10", lambda flat, p: p.all_to_all(flat)),
        ("sum 0 differs between hosts 0 and 1", lambda flat, p: p.all_reduce(flat) + float(p.rank)),
    )
    def test_it_is_refused(self, pattern, way):
        with self.assertRaisesRegex(RuntimeError, pattern):
            Rehearsal(_Wrong(way), [(10,)]).step([[np.ones(10, np.float32)]] * 2)

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
        ("optimizer of .*DiLoCo must .* got .*: KeyError", diloco._make, {"given": {"a": 1}}),
        ("exchange must be an object .*'int8'", Rehearsal, {**_REHEARSED, "exchange": "int8"}),
        ("with @.*frozen", Rehearsal, {**_REHEARSED, "exchange": type("Own", (Sum,), {})()}),
        ("a tuple in place of a list", Rehearsal, {**_REHEARSED, "exchange": _Wrong([])}),
        ("shapes must be a list .* got .3,", Rehearsal, {**_REHEARSED, "shapes": (3,)}),
        ("shapes must be of one vector, .* got .*3", Rehearsal, {**_REHEARSED, "shapes": [(2, 3)]}),
        ("dtype must be 'float32' or .* got 'no'", Rehearsal, {**_REHEARSED, "dtype": "no"}),
        ("each of the 2 hosts; got 1", _STEP, {"values": [[np.ones(3)]]}),
        ("each of the 2 hosts; got 3", _STEP, {"values": [[np.ones(3)]] * 3}),
        (r"values\[1\] .* \(\(3,\),\); got \(\(2,\),\)", _STEP, {"values": [[[1] * 3], [[1] * 2]]}),
        ("the cost of .* must be a list of Collective; got 40", calls_of, _COSTS_40),
        ("must be a dict .* got None", Rehearsal, {**_REHEARSED, "exchange": _Wrong(None)}),
        ("hosts must be at least 2; got 1", Rehearsal, {**_REHEARSED, "hosts": 1}),
    )
    def test_arguments(self, pattern, make, arguments):
        self.assertRaisesRegex((ValueError, TypeError), pattern, make, **arguments)


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
        for exchange in (BY_NAME[wire], _Wrong(lambda flat, p: p.all_reduce(tf.cast(flat, wire)))):
            total = self.step(Rehearsal(exchange, [(9,)], 5), values)
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


class CompressionTest(tf.test.TestCase):
    def test_it_finds_the_largest_directions(self):
        """Without feedback, it comes near the best approximation, which an SVD gives."""
        generator = np.random.default_rng(1)
        left, right = generator.normal(size=(60, 3)), generator.normal(size=(3, 80))
        matrices = generator.normal(size=(2, 60, 80)) + 40 * left @ right
        shapes = [(60, 80), (0, 0)]
        rehearsal = Rehearsal(PowerSGD(3, error_feedback=False), shapes, 2, "float64")
        for _ in range(8):
            total, _ = rehearsal.step([[matrix, np.zeros((0, 0))] for matrix in matrices])
        left, sizes, right = np.linalg.svd(matrices.sum(0))
        best = left[:, :3] * sizes[:3] @ right[:3]
        self.assertAllClose(total, best, rtol=0, atol=1e-6 * sizes[0])

    def test_the_largest_are_sent_and_the_rest_waits(self):
        rehearsal = Rehearsal(TopK(0.2), [(10,)], 2, "float64")
        first = np.array([0, 0, 5, 0, 0, -7, 1, 0, 0, 0.0])
        [total] = rehearsal.step([[first], [np.array([1, 0, 0, 0, 0, 9, 3, 0, 0, 0.0])]])
        self.assertAllEqual(total, [0, 0, 5, 0, 0, 2, 3, 0, 0, 0])
        [total] = rehearsal.step([[np.zeros(10)], [np.zeros(10)]])
        self.assertAllEqual(total, [1, 0, 0, 0, 0, 0, 1, 0, 0, 0])


_ROWS = 40


def contract(strategy: Any) -> dict[str, np.ndarray]:
    """Sums with half of the exchanges; returns what each replica of this host gets."""
    results: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        if case.devices == len(strategy.extended.worker_devices):
            results |= _contract(name, other_strategy(strategy, exchange=case.exchange))
    return results


def _contract(name: str, strategy: Any) -> dict[str, np.ndarray]:
    local = strategy.experimental_local_results
    distributed = functools.partial(tu.distributed, strategy)

    @tf.function(autograph=False)
    def reduce(values: Any) -> Any:
        def step(values: Any) -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", values)

        return strategy.run(step, (values,))

    def of_step(step: int) -> Any:
        return distributed(lambda replica: list(map(tf.constant, numbers(replica, step))))

    def summed(values: Any) -> list[np.ndarray]:
        return [np.stack([part.numpy() for part in local(total)]) for total in reduce(values)]

    results = {}
    for step in range(STEPS):
        for index, total in enumerate(summed(of_step(step))):
            results[f"{name} {step} {index}"] = total
    plan = recently_planned()[0].plan
    assert f", by {CASES[name].exchange}" in between._describe(plan)["packs"][0]  # Hosts are told.
    order = [part.value for part in plan.packs[0].slices]
    results[f"{name} order"] = np.array([order] * len(strategy.extended.worker_devices))
    _check_state(strategy.cross_device_ops, lambda: summed(of_step(STEPS)))
    spoiled = of_step(0)
    if strategy.cluster_resolver.task_id == 0:
        spoiled = distributed(lambda replica: [tf.fill(s, np.float32(np.nan)) for s in SHAPES])
    assert not all(np.all(np.isfinite(total)) for total in summed(spoiled))
    assert all(np.all(np.isfinite(total)) for total in summed(of_step(0)))
    assert name == "Sum" or f" by {CASES[name].exchange} along " in str(strategy.explain(SHAPES))
    if name == "Cast":  # Which would round all of these.
        _check_exact(strategy, distributed, reduce)
    results[f"{name} bytes"] = _bytes(strategy, reduce.get_concrete_function(of_step(0)).graph)
    return results


def _check_exact(strategy: Any, distributed: Any, reduce: Any) -> None:
    """Asserts that no exchange rounds rows, and values reduced alone.

    `decide_test` has others; `wire_dtype_test` reads statistics.
    """
    replicas = strategy.num_replicas_in_sync
    expected = replicas + 2.0**-20 * replicas * (replicas + 1) / 2

    def rows(replica: int) -> tf.IndexedSlices:
        values = tf.fill([_ROWS, 50], 1 + 2.0**-20 * (replica + 1))
        return tf.IndexedSlices(values, tf.range(_ROWS), tf.constant([_ROWS, 50]))

    tables = distributed(rows)
    near_one = distributed(lambda replica: tf.fill([3000], 1 + 2.0**-20 * (replica + 1)))
    # A value that is reduced alone is not taken for a gradient.
    for value in (near_one, [tables, tables]):
        for total in strategy.experimental_local_results(tf.nest.flatten(reduce(value))[0]):
            found = tf.convert_to_tensor(total).numpy()
            np.testing.assert_allclose(found, np.full_like(found, expected), rtol=2.0**-22)


def _check_state(ops: Any, result: Any) -> None:
    """Asserts that a checkpoint holds all that the next step depends on."""
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(ops=ops).save(f"{folder}/saved")
        expected = result()
        result()
        tf.train.Checkpoint(ops=ops).restore(saved).assert_consumed()
        for one, other in zip(expected, result(), strict=True):
            np.testing.assert_array_equal(one, other)


def _bytes(strategy: Any, graph: tf.Graph) -> np.ndarray:
    hosts = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
    parts = {
        "CollectiveReduceV2": 2 * (hosts - 1) / hosts,
        "CollectiveAllToAllV2": (hosts - 1) / hosts,
        "CollectiveGatherV2": hosts - 1,
    }
    sent = 0.0
    for op in graph.get_operations():
        # Examples are counted in int64.
        if op.type in parts and op.inputs[0].dtype != tf.int64:
            size = op.inputs[0].shape.num_elements()
            sent += np.nan if size is None else size * op.inputs[0].dtype.size * parts[op.type]
    explained = strategy.explain(SHAPES).bytes_between_hosts
    return np.array([[explained, sent]] * len(strategy.extended.worker_devices))


def by_path(strategy: Any) -> dict[str, np.ndarray]:
    asked: dict[str, Any] = {}

    def chosen(path: str | None, spec: Any) -> Any:
        if path:
            asked[path.partition("/")[2]] = spec.shape
        return "int8" if path and path.endswith("kernel") else tfcdo.exchange.Sum()

    other = other_strategy(strategy, exchange=chosen)
    with other.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50, name="first")])
        model.compile("sgd", "mse")  # Only plans of graphs are remembered.
    draw = np.random.default_rng(5).normal
    model.fit(draw(size=(32, 40)), draw(size=(32, 50)), 32, shuffle=False, verbose=0)
    assert asked == {"first/kernel": (40, 50), "first/bias": (50,)}, asked
    plans = [one.plan for one in recently_planned() if len(one.plan.values) == 2]
    packs = [{type(pack.root.exchange).__name__ for pack in plan.packs} for plan in plans]
    assert {"Blocks", "Sum"} in packs, packs
    return weights(other, model.weights)


_TIMEOUT = 600.0


class HostsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((2, 2, ("contract", "by_path")), (3, 1, ("contract",)))
    def test_hosts(self, hosts, devices, names):
        results, _ = clusters.run_scenarios(hosts, __file__, devices, names, _TIMEOUT)
        alike = {name: self.alike(one, hosts, devices) for name, one in results.items()}
        contract = alike["contract"]
        for name in {key.rsplit(" ", 2)[0] for key in contract if key.split()[-2].isdigit()}:
            with self.subTest(name):
                self.check_as_rehearsed(name, contract, hosts, devices)
                explained, sent = contract[f"{name} bytes"]
                if not CASES[name].is_late:  # Its first steps send more.
                    self.assertEqual(explained, round(sent))

    def alike(self, of_hosts, hosts, devices):
        results = {}
        for key in of_hosts[0]:
            replicas = [replica for own in of_hosts for replica in own[key]]
            self.assertLen(replicas, hosts * devices)
            self.assertLen({replica.tobytes() for replica in replicas}, 1, key)
            results[key] = replicas[0]
        return results

    def check_as_rehearsed(self, name, results, hosts, devices):
        exchange = CASES[name].exchange
        order = results[f"{name} order"]
        rehearsal = Rehearsal(exchange, shapes_for(exchange, order), hosts)
        for step in range(STEPS):
            # A host's sum of two is the same bits in any order.
            by_replica = [numbers(replica, step) for replica in range(hosts * devices)]
            by_host = [
                [np.sum(each, 0) for each in zip(*by_replica[first : first + devices], strict=True)]
                for first in range(0, len(by_replica), devices)
            ]
            sums = rehearsal.step([given(exchange, values, order) for values in by_host])
            if not exchange.whole_values:
                cuts = np.cumsum([np.prod(SHAPES[index]) for index in order])[:-1]
                sums = np.split(sums[0], cuts)
            for index, wanted in zip(order, sums, strict=True):
                found = results[f"{name} {step} {index}"]
                self.assertAllClose(np.reshape(wanted, SHAPES[index]), found, rtol=0, atol=1e-4)


if __name__ == "__main__":
    tf.test.main()
