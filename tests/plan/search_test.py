"""Packed trees and auto: as fast as promised, found again, and kept where they should be."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import random
import tempfile
from unittest import mock

import bundle_plans
import hypothesis
import plan_testing
from absl.testing import absltest
from absl.testing import parameterized
from hypothesis import strategies as st

from tfcdo import log
from tfcdo.plan import algorithms
from tfcdo.plan import copy_tree
from tfcdo.plan import plan_cache
from tfcdo.plan import search
from tfcdo.plan import simulator
from tfcdo.plan.copy_tree import chain
from tfcdo.plan.copy_tree import two_level
from tfcdo.plan.lower_bound import lower_bound
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.tree_packing import MAX_PACKS
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.plan.tree_packing import initial_candidates
from tfcdo.plan.tree_packing import packed
from tfcdo.plan.tree_packing import ring_paths
from tfcdo.topology.links import Resource
from tfcdo.topology.presets import PRESETS
from tfcdo.topology.presets import preset

MB, GB = 10**6, 10**9
DGX1 = preset("dgx1")
# A machine that no preset was made for: the first five of eight devices on PCIe.
UNKNOWN = preset("pcie", 5)


def forget() -> None:
    """Clears what this process remembers of earlier searches."""
    algorithms._make_schedule.cache_clear()
    search._best_forest.cache_clear()
    search._searched.cache_clear()


class SearchTestCase(plan_testing.PlanTestCase):
    def setUp(self) -> None:
        super().setUp()
        forget()
        self.addCleanup(forget)


class RatiosTest(SearchTestCase):
    """What the project promises: times against the bound, with 10 us latency and free additions."""

    @parameterized.parameters((MB, 6.5), (25 * MB, 1.60), (100 * MB, 1.25), (GB, 1.10))
    def test_dgx1(self, num_bytes, ratio):
        schedule = algorithms.make_schedule("packed_trees", DGX1, num_bytes)
        bound = 14 / 48 * num_bytes / 25e9
        self.assertLessEqual(simulator.robust_seconds(schedule, DGX1) / bound, ratio)

    @parameterized.parameters(
        ("nvswitch", range(8), 2 * 7 / 8 / 300e9, 1.28, 1.06),
        ("pcie", range(4), 12.5e-3 / 100e6, 1.12, 1.12),
        ("dgx1", (0, 1, 2), 1 / 50e9, 1.18, 1.07),
        ("dgx1", (0, 1, 2, 3, 4), 1 / 50e9, 1.36, 1.13),
    )
    def test_elsewhere(self, name, devices, seconds_per_byte, at_100_mb, at_1_gb):
        machine = preset(name).subset(devices)
        for num_bytes, ratio in ((100 * MB, at_100_mb), (GB, at_1_gb)):
            schedule = algorithms.make_schedule("packed_trees", machine, num_bytes)
            own = simulator.robust_seconds(schedule, machine)
            self.assertLessEqual(own / (seconds_per_byte * num_bytes), ratio)

    def test_rings_need_no_search(self):
        forest = ring_paths(DGX1, copies=2)
        assert forest is not None
        for num_bytes, ratio in ((100 * MB, 1.21), (GB, 1.10)):
            robust = simulator.robust_seconds(forest.schedule(num_bytes), DGX1)
            self.assertLessEqual(robust / lower_bound(DGX1, num_bytes), ratio)

    @parameterized.product(
        machine=[
            ("dgx1", (0, 1, 2, 3)),
            ("dgx1", (0, 1, 4, 5)),
            ("dgx1", (0, 1, 2, 3, 5, 6)),
            ("pcie", (0, 1, 2, 3, 4, 5)),
        ],
        num_bytes=[MB, 100 * MB],
    )
    def test_what_no_preset_covers_is_as_fast_as_the_classics(self, machine, num_bytes):
        topology = preset(machine[0], 8).subset(machine[1])
        own = simulator.robust_seconds(search.packed_trees(topology, num_bytes), topology)
        for name in algorithms.CLASSICS:
            classic = algorithms.make_schedule(name, topology, num_bytes)
            # The search stops when it is good enough.
            best = simulator.robust_seconds(classic, topology)
            self.assertLessEqual(own, 1.01 * best, name)


class AutoTest(SearchTestCase):
    @hypothesis.settings(max_examples=40, deadline=None)
    @hypothesis.given(
        st.sampled_from(PRESETS),
        st.integers(1, 8),
        st.sampled_from([0, 4, 1000, MB, 30 * MB, GB]),
        st.none() | st.integers(1, 12),
    )
    def test_never_loses(self, name, devices, num_bytes, num_packs):
        machine = preset(name, devices)
        times = {
            algorithm: simulator.robust_seconds(
                algorithms.make_schedule(algorithm, machine, num_bytes, num_packs), machine
            )
            for algorithm in algorithms.ALGORITHMS
        }
        self.assertLessEqual(times["auto"], min(times.values()) / 0.99)

    def test_takes_the_simplest_of_equals(self):
        # Wherever virtual CPUs add, they add with the same cores: one pack, one star.
        machine = preset("shared_memory", 8)
        self.assertEqual(algorithms.fastest_algorithm(machine, 100 * MB), "one_device")

    def test_many_packs_are_judged_by_few(self):
        machine = preset("nvswitch")
        with mock.patch.object(
            simulator, "robust_seconds", wraps=simulator.robust_seconds
        ) as judged:
            schedule = algorithms.make_schedule("auto", machine, MB, num_packs=2000)
        self.assertLen(schedule.packs, 2000)
        self.assertLessEqual(max(len(call.args[0].packs) for call in judged.mock_calls), 64)


class FoundAgainTest(SearchTestCase):
    def test_the_same_search_finds_the_same(self):
        found = [search.search(UNKNOWN, 30 * MB) for _ in range(2)]
        self.assertEqual(*found)

    def test_a_size_class_is_searched_once(self):
        with mock.patch.object(search, "search", wraps=search.search) as searched:
            for num_bytes in (29 * MB, 30 * MB, 31 * MB, 30 * MB):
                algorithms.make_schedule("packed_trees", UNKNOWN, num_bytes)
            self.assertEqual(searched.call_count, 1)
            forget()  # As in a new process, which finds the file.
            algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB)
            self.assertEqual(searched.call_count, 1)
            algorithms.make_schedule("packed_trees", UNKNOWN, 300 * MB)
            algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB, num_packs=5)
            algorithms.make_schedule("packed_trees", preset("pcie", 6), 30 * MB)
            self.assertEqual(searched.call_count, 4)
        self.assertLen(list(pathlib.Path(self.cache).iterdir()), 4)

    def test_as_many_packs_as_are_asked_for_of_one_size(self):
        machine = DGX1.subset(range(4))  # Five equal shares are not what is fastest here.
        forest = search.search(machine, 25 * MB, num_packs=5)
        self.assertLen(forest.trees, 5)
        self.assertLen(set(forest.shares), 1)
        with mock.patch.object(search, "fastest", wraps=search.fastest) as fastest:
            self.assertLen(search.packed_trees(DGX1, 30 * MB, num_packs=7).packs, 7)
        (known, *_), _ = fastest.call_args
        self.assertEqual({len(forest.trees) for forest in known}, {7})

    @parameterized.parameters((1, MB), (5, 0))
    def test_what_takes_no_time_needs_no_search(self, devices, num_bytes):
        machine = preset("pcie", devices)
        with mock.patch.object(search, "search") as searched:
            search.packed_trees(machine, num_bytes)
        searched.assert_not_called()

    def test_many_packs_are_searched_by_few(self):
        with mock.patch.object(search, "search", wraps=search.search) as searched:
            schedule = search.packed_trees(UNKNOWN, 200 * 2**20, num_packs=200)
        self.assertLen(schedule.packs, 200)
        searched.assert_called_once_with(UNKNOWN, 64 * 2**20, 64)

    def test_a_file_gives_the_schedule_that_the_search_gave(self):
        first = algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB)
        forget()
        self.assertEqual(algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB), first)

    def test_presets_need_no_search(self):
        with mock.patch.object(search, "search") as searched:
            for entry in json.loads(plan_cache.PRESETS_FILE.read_text(encoding="utf-8")):
                machine = preset(entry["topology"], entry["num_devices"])
                machine = machine.subset(entry.get("subset", range(machine.num_devices)))
                shuffled = list(range(machine.num_devices))
                random.Random(0).shuffle(shuffled)
                for topology in (machine, machine.subset(shuffled)):
                    algorithms.make_schedule("packed_trees", topology, 7 * MB)
        searched.assert_not_called()

    def test_a_machine_that_only_looks_like_a_preset_is_none(self):
        # The same speeds from each to each as nvswitch, but no ports that transfers would share.
        machine = preset("nvswitch")
        wires = tuple(Resource(f"{link.source}-{link.target}", 300e9) for link in machine.links)
        links = tuple(
            dataclasses.replace(link, resources=(index,))
            for index, link in enumerate(machine.links)
        )
        other = dataclasses.replace(machine, resources=wires, links=links)
        self.assertEqual(other.link_kinds, machine.link_kinds)
        self.assertEmpty(plan_cache.presets(other))
        self.assertNotEmpty(plan_cache.presets(machine))

    def test_renumbered_machines_are_as_fast(self):
        order = (5, 2, 7, 0, 3, 6, 1, 4)
        times = [
            simulator.simulate(algorithms.make_schedule("packed_trees", m, 25 * MB), m).seconds
            for m in (DGX1, DGX1.subset(order))
        ]
        self.assertAlmostEqual(times[0], times[1], delta=0.02 * times[0])


class CacheTest(SearchTestCase):
    def setUp(self) -> None:
        super().setUp()
        log.warn_once.cache_clear()

    def plan(self) -> Schedule:
        forget()
        return algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB)

    @parameterized.parameters(
        b"", b"{", b"[]", b"null", b'{"shares": [1]}', b"\xff\xfe",
        b'{"shares": [1], "parents": [[null, 0]]}',  # Of two devices.
        b'{"shares": [1], "parents": [[1, 0, 0, 0, 0]]}',  # No tree.
        b'{"shares": [-1], "parents": [[null, 0, 0, 0, 0]]}',
        b'{"shares": [], "parents": []}',
        b'{"shares": [1e308, 1e308], "parents": [[null, 0, 0, 0, 0], [null, 0, 0, 0, 0]]}',
        b'{"shares": ["x"], "parents": [[null, 0, 0, 0, 0]]}',
        b'{"shares": [1], "parents": [[null, 0, 0, 0, "x"]]}',
        b'{"shares": [1], "parents": 5}',
        b'{"shares": [1' + 400 * b"0" + b'], "parents": [[null, 0, 0, 0, 0]]}',
        b"[" * 100_000,
    )  # fmt: skip
    def test_a_damaged_file_is_ignored_with_one_line(self, content):
        expected = self.plan()
        (file,) = pathlib.Path(self.cache).iterdir()
        file.write_bytes(content)
        with self.assertLogs(level=logging.WARNING) as logged:
            self.assertEqual(self.plan(), expected)
        self.assertLen(logged.output, 1)
        self.assertIn(str(file), logged.output[0])
        self.assertNotIn("\n", logged.output[0])
        self.assertEqual(self.plan(), expected)  # The file is whole again.
        self.assertEqual(len(json.loads(file.read_text())["shares"]), len(expected.packs))

    def test_a_file_of_another_number_of_packs_is_ignored(self):
        def plan() -> Schedule:
            forget()
            return algorithms.make_schedule("packed_trees", UNKNOWN, 30 * MB, num_packs=5)

        expected = plan()
        (file,) = pathlib.Path(self.cache).iterdir()
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {key: content[key][:1] for key in content}))
        self.assertEqual(plan(), expected)
        self.assertEqual(json.loads(file.read_text()), content)

    def test_a_directory_that_cannot_be_written_is_no_error(self):
        with tempfile.NamedTemporaryFile() as file:
            nowhere = f"{file.name}/below"
            with (
                mock.patch.dict(os.environ, {"TFCDO_CACHE_DIR": nowhere}),
                self.assertLogs(level=logging.WARNING) as logged,
            ):
                self.plan()
        self.assertLen(logged.output, 1)
        self.assertRegex(logged.output[0], "cannot be used: Not a dir.*TFCDO_CACHE_DIR")

    def test_a_file_that_cannot_be_read_is_told(self):
        expected = self.plan()
        (file,) = pathlib.Path(self.cache).iterdir()

        def denied(*_, **__):
            raise PermissionError(13, "Permission denied", str(file))

        with (
            mock.patch.object(pathlib.Path, "read_text", denied),
            self.assertLogs(level=logging.WARNING) as logged,
        ):
            self.assertEqual(self.plan(), expected)
        self.assertLen(logged.output, 1)
        self.assertIn(f"because {self.cache} cannot be used: Permission denied;", logged.output[0])

    def test_what_can_be_neither_read_nor_written_is_told_once(self):
        too_long = f"{self.cache}/{300 * 'x'}"
        with (
            mock.patch.dict(os.environ, {"TFCDO_CACHE_DIR": too_long}),
            self.assertLogs(level=logging.WARNING) as logged,
        ):
            self.plan()
            algorithms.make_schedule("packed_trees", UNKNOWN, 300 * MB)
        self.assertLen(logged.output, 1)
        self.assertIn("cannot be used: File name too long", logged.output[0])

    def test_without_a_home_nothing_is_kept(self):
        nowhere = {"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
        with (
            mock.patch.dict(os.environ, nowhere),
            # A user that is a mere number, as in a container.
            mock.patch("pwd.getpwuid", side_effect=KeyError("uid not found")),
            self.assertLogs(level=logging.WARNING) as logged,
        ):
            os.environ.pop("HOME", None)
            self.plan()
        self.assertLen(logged.output, 1)
        self.assertRegex(logged.output[0], "there is no home directory for ~/.cache/tfcdo; TFC")

    def test_files_appear_whole(self):
        def interrupted(*_):
            raise OSError("no space left")

        with (
            mock.patch.object(pathlib.Path, "replace", interrupted),
            self.assertLogs(level=logging.WARNING),
        ):
            self.plan()
        self.assertEmpty(list(pathlib.Path(self.cache).iterdir()))

    @parameterized.parameters(
        ({"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": "{}"}, "tfcdo"),
        ({"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "{}"}, ".cache/tfcdo"),
        ({"TFCDO_CACHE_DIR": "{}", "XDG_CACHE_HOME": "/elsewhere"}, "."),
        ({"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": "relative", "HOME": "{}"}, ".cache/tfcdo"),
        ({"TFCDO_CACHE_DIR": "~/mine", "HOME": "{}"}, "mine"),
    )
    def test_where(self, variables, folder):
        with mock.patch.dict(os.environ, {k: v.format(self.cache) for k, v in variables.items()}):
            self.plan()
        self.assertLen(list((pathlib.Path(self.cache) / folder).glob("plan-*.json")), 1)


class PresetsTest(SearchTestCase):
    def entries(self):
        return json.loads(plan_cache.PRESETS_FILE.read_text(encoding="utf-8"))

    def test_presets_are_what_they_say(self):
        for entry in self.entries():
            machine = preset(entry["topology"], entry["num_devices"])
            machine = machine.subset(entry.get("subset", range(machine.num_devices)))
            forest = plan_cache.decode(entry["forest"], machine.num_devices)
            schedule = forest.schedule(entry["num_bytes"])
            bound = lower_bound(machine, entry["num_bytes"])
            robust = simulator.robust_seconds(schedule, machine) / bound
            self.assertAlmostEqual(robust / entry["robust_ratio"], 1, delta=0.01)

    def test_presets_can_be_made_again(self):
        machine = bundle_plans.Machine("pcie", 4)
        case = next(
            case
            for case in bundle_plans.EASY_CASES
            if case.machine == machine and case.num_bytes == MB
        )
        with mock.patch.object(search, "_TASKS_PER_SEARCH", 60_000):
            (entry,) = bundle_plans.entries(case, bundle_plans.solve(case))
        self.assertIn(json.loads(json.dumps(entry)), self.entries())

    @parameterized.parameters(False, True)
    def test_hard_cases_improve_on_where_they_began(self, rings):
        case = bundle_plans.Case(
            bundle_plans.DGX1, 25 * MB, trees=2, rings=rings, symmetric=True, seeds=2, tasks=3000,
            temperature=0.02, polish_tasks=3000, larger=((GB, 2),),
        )  # fmt: skip
        (size, forest), (larger, copies) = bundle_plans.solve(case)
        self.assertEqual((size, larger), (25 * MB, GB))
        forest.schedule(size)
        group = search.symmetries(DGX1)
        start = bundle_plans._start(case, DGX1, group, random.Random(0)).expanded(group)
        self.assertLess(search.cost(forest, DGX1, size), search.cost(start, DGX1, size))
        self.assertGreaterEqual(len(copies.trees), 8)


class ForestTest(parameterized.TestCase):
    @hypothesis.settings(max_examples=100, deadline=None)
    @hypothesis.given(
        st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.integers(0, 10**10)
    )
    def test_packs_have_the_forest_s_shares(self, shares, num_bytes):
        trees = [copy_tree.star(20, root) for root in range(len(shares))]
        schedule = TreePacking(tuple(trees), tuple(shares)).schedule(num_bytes)
        sizes = {pack.tree.root: pack.size for pack in schedule.packs}
        for root, share in enumerate(shares):
            # Both ends are rounded; a tree without a whole byte gets no pack.
            own = num_bytes * share / sum(shares)
            self.assertAlmostEqual(sizes.get(root, 0), own, delta=1.01)

    @parameterized.parameters(
        ((), (), "as many shares"),
        ((copy_tree.star(2),), (1.0, 1.0), "2 shares for 1 trees"),
        ((copy_tree.star(2),), (0.0,), "positive"),
        ((copy_tree.star(2),), (float("nan"),), "positive"),
        ((copy_tree.star(2),) * 3, (1e308,) * 3, "a sum that is a number; got .1e.308, "),
        ((copy_tree.star(2), copy_tree.star(3)), (1.0, 1.0), "same devices"),
    )
    def test_what_is_no_forest(self, trees, shares, message):
        with self.assertRaisesRegex(ValueError, message):
            TreePacking(trees, shares)

    @parameterized.parameters(2**53 + 1, 2**60 - 1, 2**60 + 129, 10**19 - 1, 10**300)
    def test_more_bytes_than_a_float_can_count(self, num_bytes):
        # The last share is far too small to count among so many.
        for shares in ((1.0,), (1.0, 3.0), (1.0, 3.0, 1e-30)):
            trees = tuple(copy_tree.star(3, root) for root in range(len(shares)))
            schedule = TreePacking(trees, shares).schedule(num_bytes)
            self.assertAlmostEqual(schedule.packs[0].size / num_bytes, shares[0] / sum(shares))

    def test_ends_are_rounded_to_the_nearest_byte(self):
        forest = TreePacking((copy_tree.star(2),) * 3, (1.0,) * 3)
        self.assertEqual([pack.stop for pack in forest.schedule(8).packs], [3, 5, 8])

    def test_a_share_as_large_as_a_float(self):
        schedule = TreePacking((copy_tree.star(2),) * 2, (1e307, 3e307)).schedule(100 * MB)
        self.assertEqual([pack.size for pack in schedule.packs], [25 * MB, 75 * MB])

    @parameterized.parameters((0, ValueError, "0"), (-1, ValueError, "-1"), (2.0, TypeError, "2.0"))
    def test_no_deal(self, num_packs, error, given):
        forest = TreePacking((copy_tree.star(2),), (1.0,))
        with self.assertRaisesRegex(error, f"num_packs must be .*; got {given}"):
            forest.dealt(num_packs)

    def test_none_is_fastest_of_none(self):
        with self.assertRaisesRegex(ValueError, "forests must hold at least one"):
            search.fastest([], DGX1, MB)

    def test_images(self):
        forest = TreePacking((chain(3),), (2.0,)).expanded([(0, 1, 2), (1, 2, 0)])
        self.assertEqual([tree.parents for tree in forest.trees], [(None, 0, 1), (2, None, 1)])
        self.assertEqual(forest.shares, (2.0, 2.0))

    def test_rings_fill_a_dgx1(self):
        forest = ring_paths(DGX1)
        assert forest is not None
        carried = simulator.bytes_by_resource(forest.schedule(24 * 7 * MB), DGX1)
        busy = {
            resource.name: carried[resource.name] / resource.bandwidth
            for resource in DGX1.resources
        }
        wires = [seconds for name, seconds in busy.items() if "host" not in name]
        self.assertLen(wires, 32)
        self.assertAlmostEqual(min(wires) / max(wires), 1)
        self.assertEqual({tree.depth for tree in forest.trees}, {4})

    def test_no_ring(self):
        self.assertIsNone(ring_paths(DGX1.subset([0, 1])))
        self.assertIsNone(ring_paths(DGX1.subset([0, 1, 2, 4])))

    def test_packed_trees_share_the_links(self):
        forest = packed(DGX1, 24)
        carried = simulator.bytes_by_resource(forest.schedule(24 * MB), DGX1)
        used = [load / r.bandwidth for load, r in zip(carried.values(), DGX1.resources) if load]
        ideal = lower_bound(DGX1, 24 * MB)
        self.assertLess(max(used), 1.2 * ideal)

    @parameterized.product(name=PRESETS, devices=[2, 3, 8])
    def test_every_start_is_a_schedule(self, name, devices):
        machine = preset(name, devices)
        forests = initial_candidates(machine)
        for forest in forests:
            forest.schedule(MB)
            self.assertLessEqual(len(forest.trees), MAX_PACKS)
        self.assertLen(set(forests), len(forests))


class CostTest(parameterized.TestCase):
    STARS = TreePacking(tuple(copy_tree.star(8, root) for root in range(4)), (1.0,) * 4)

    @parameterized.parameters(0.3, 0.6, 0.9, 1.0, 1.1, 2.0)
    def test_gives_up_only_what_costs_more(self, part):
        exact = search.cost(self.STARS, DGX1, 25 * MB)
        given_up = search.cost(self.STARS, DGX1, 25 * MB, cutoff=part * exact)
        if part >= 1:
            self.assertEqual(given_up, exact)
        else:
            self.assertGreater(given_up, part * exact)

    def test_smooth_is_the_mean_end_of_the_links(self):
        # One link up, and then one link down: the first ends half way.
        machine = preset("nvswitch", 2)
        forest = TreePacking((copy_tree.star(2),), (1.0,))
        whole = 2 * (1e-5 + MB / 300e9)
        for smoothness, part in ((0.0, 1.0), (0.5, 0.875), (1.0, 0.75)):
            own = search.cost(forest, machine, MB, robustness=0.0, smoothness=smoothness)
            self.assertAlmostEqual(own / whole, part)

    @parameterized.parameters(
        ({1: 1.0, 2: 0.995, 4: 1.0}, 1), ({1: 1.0, 2: 0.995, 4: 0.98}, 4), ({4: 0.5, 2: 1.0}, 4)
    )
    def test_more_packs_must_be_worth_it(self, costs, expected):
        star = TreePacking((copy_tree.star(8),), (1.0,))

        def cost(forest: TreePacking, *_: object, **__: object) -> float:
            return costs[len(forest.trees)]

        with mock.patch.object(search, "cost", cost):
            forests = [star.dealt(count) for count in reversed(costs)]
            self.assertLen(search.fastest(forests, DGX1, MB).trees, expected)

    def test_symmetries_keep_the_links(self):
        found = search.symmetries(DGX1)
        self.assertLen(set(found), 4)
        for order in found:
            self.assertEqual(DGX1.subset(order).link_kinds, DGX1.link_kinds)

    def test_too_many_symmetries_are_none(self):
        identity = tuple(range(8))
        self.assertEqual(search.symmetries(preset("nvswitch")), (identity,))
        self.assertEqual(search.symmetries(DGX1, limit=3), (identity,))
        self.assertLen(search.symmetries(DGX1, limit=4), 4)


class ImproveTest(parameterized.TestCase):
    def test_one_device_has_nothing_to_improve(self):
        machine = preset("dgx1", 1)
        found = search.search(machine, MB, num_packs=1)
        self.assertEqual(found.trees, (copy_tree.star(1),))
        self.assertEqual(search.cost(found, machine, MB, smoothness=1.0), 0.0)

    def test_no_step_makes_more_packs_than_there_may_be(self):
        group = search.symmetries(DGX1)
        start = TreePacking((copy_tree.star(8),), (1.0,))
        most = 3 * len(group)
        with (
            mock.patch.object(search, "MAX_PACKS", most),
            # All steps are as good, so that all are taken.
            mock.patch.object(search, "cost", return_value=1.0) as cost,
        ):
            search.improve(start, DGX1, MB, group=group, tasks=500_000)
        tried = {len(call.args[0].trees) for call in cost.mock_calls}
        self.assertEqual(tried, {len(group), 2 * len(group), most})

    def test_improves_with_and_without_symmetry(self):
        start = TreePacking(tuple(two_level(8, r) for r in (0, 2)), (1.0, 1.0))
        for group in (None, search.symmetries(DGX1)):
            expanded = start.expanded(group) if group else start
            found = search.improve(start, DGX1, 25 * MB, group=group, tasks=10_000)
            if group:
                found = found.expanded(group)
            before, after = (search.cost(f, DGX1, 25 * MB) for f in (expanded, found))
            self.assertLess(after, 0.95 * before)

    def test_equal_shares_stay_equal(self):
        start = TreePacking(tuple(copy_tree.star(8, r) for r in range(5)), (1.0,) * 5)
        found = search.improve(start, DGX1, 25 * MB, tasks=5_000, equal_shares=True)
        self.assertEqual(found.shares, start.shares)
        self.assertNotEqual(found.trees, start.trees)

    def test_no_step_leaves_the_machine_s_own_links(self):
        start = TreePacking((two_level(8, 0),), (1.0,))
        found = search.improve(start, DGX1, MB, tasks=20_000, temperature=5.0)
        old = set(start.trees[0].edges)
        for tree in found.trees:
            for child, parent in set(tree.edges) - old:
                self.assertFalse(
                    DGX1.link_by_pair[child, parent].via_host and (parent, child) not in old
                )


if __name__ == "__main__":
    absltest.main()
