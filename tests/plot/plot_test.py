"""The machine and its copy trees: lines, arrows and legend, as matplotlib holds them."""

from __future__ import annotations

import itertools
import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl.testing import absltest, parameterized

from tfcdo import plot
from tfcdo.plan import algorithms
from tfcdo.plan.copy_tree import CopyTree
from tfcdo.plan.plan import Plan, cut, in_turn
from tfcdo.plot import draw_trees, save_figure
from tfcdo.topology.links import Resource, Route, ordered_pairs
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology


def _plan(name: str, algorithm: str, devices: int | None = None) -> tuple[Plan, Topology]:
    machine = preset(name, devices)
    return algorithms.make_plan(algorithm, machine, 10**8), machine


_Places = Mapping[int, tuple[float, float]]
# What is drawn is looked at by attributes that only some of matplotlib's artists have.
_draw: Callable[..., Any] = draw_trees


def _machine(
    devices: int,
    wired: Mapping[tuple[int, int], Sequence[tuple[str, float]]],
    host: Callable[[int, int], float] = lambda source, target: 10e9,
    name: str = "mine",
) -> Topology:
    """Returns a machine of some links; any other pair is joined through the host, by itself."""
    routes = []
    for source, target in ordered_pairs(devices):
        if (source, target) in wired:
            resources = [Resource(*resource) for resource in wired[source, target]]
            routes.append(Route(source, target, resources))
        else:
            bridge = Resource(f"host {source}→{target}", host(source, target))
            routes.append(Route(source, target, [bridge], via_host=True))
    return Topology.from_routes(name, devices, routes)


def _separate_wires(speeds: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], Any]:
    return {(a, b): [(f"{a}→{b}", speed)] for (a, b), speed in speeds.items()}


def _machine_axes(machine: Topology) -> Any:
    figure = _draw(algorithms.make_plan("ring", machine, 10**6), machine)
    figure.draw_without_rendering()  # Else arrows do not know where their ends are.
    return figure.axes[0]


def _legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def _places(axes: Any) -> _Places:
    """Returns where the number of each device stands."""
    return {int(text.get_text()): text.get_position() for text in axes.texts}


def _nearest(places: _Places, point: Sequence[float]) -> int:
    return min(places, key=lambda device: math.dist(places[device], point))


def _joined_pairs(axes: Any) -> set[tuple[int, int]]:
    """Returns the pairs `a < b` that a line without an arrow joins."""
    places = _places(axes)
    ends = set()
    for collection in axes.collections:
        if hasattr(collection, "get_segments"):
            for start, stop in collection.get_segments():
                a, b = sorted((_nearest(places, start), _nearest(places, stop)))
                ends.add((a, b))
    return ends


def _arrows(axes: Any) -> set[tuple[int, int]]:
    """Returns the `(source, target)` of each arrow, whose path is a tail and then mostly head."""
    places = _places(axes)
    found = set()
    for arrow in axes.patches:
        points = arrow.get_path().vertices
        found.add((_nearest(places, points[0]), _nearest(places, points[-2])))
    return found


def _neighbours(axes: Any) -> set[tuple[int, int]]:
    """Returns the pairs `a < b` of devices that stand next to each other on the circle."""
    places = _places(axes)
    side = 2 * math.sin(math.pi / len(places))
    return {
        (a, b)
        for a, b in itertools.combinations(sorted(places), 2)
        if math.dist(places[a], places[b]) < side + 1e-6
    }


class TreesTest(parameterized.TestCase):
    def test_one_picture_for_each_tree(self):
        schedule, machine = _plan("dgx1", "hierarchical_copy")
        machine_axes, *trees = _draw(schedule, machine).axes
        self.assertLen(trees, 8)
        self.assertEqual(trees[3].get_title(), "pack 3\n12.5 MB")
        # Seven edges of the tree, each an arrow.
        self.assertLen(trees[3].patches, 7)
        numbers = sorted(text.get_text() for text in machine_axes.texts)
        self.assertEqual(numbers, [*"01234567"])
        legend = [text.get_text() for text in machine_axes.get_legend().get_texts()]
        self.assertEqual(
            legend,
            ["25 GB/s each way", "50 GB/s each way", "no line: through the host, 10 GB/s"],
        )

    def test_arrows_of_a_tree_point_to_its_root(self):
        machine = preset("dgx1")
        tree = CopyTree((1, 2, None, 2, 0, 1, 2, 3))
        schedule = in_turn([800], [tree])
        figure = _draw(schedule, machine)
        figure.draw_without_rendering()
        wanted = {(0, 1), (1, 2), (3, 2), (4, 0), (5, 1), (6, 2), (7, 3)}
        self.assertEqual(_arrows(figure.axes[1]), wanted)

    @parameterized.parameters(
        ("pcie", 4, True), ("nvswitch", 4, True), ("nvswitch", 3, True), ("dgx1", 4, False)
    )
    def test_links_that_share_their_path_are_dashed(self, name: str, devices: int, dashed: bool):
        axes = _machine_axes(preset(name, devices))
        lines = [one for one in axes.collections if hasattr(one, "get_segments")]
        # A solid line has no pattern.
        styles = {pattern is not None for one in lines for _, pattern in one.get_linestyle()}
        self.assertEqual(styles, {dashed})
        self.assertEqual({line.get_linestyle() for line in axes.lines}, {"--" if dashed else "-"})
        for text in _legend(axes):
            self.assertEqual("shares its path with others" in text, dashed)

    def test_links_of_different_speeds_are_two_arrows(self):
        speeds = {(0, 1): 50e9, (1, 0): 10e9, (1, 2): 25e9, (2, 1): 25e9}
        machine = _machine(3, _separate_wires(speeds))
        axes = _machine_axes(machine)
        self.assertEqual(_arrows(axes), {(0, 1), (1, 0)})
        self.assertEqual(_joined_pairs(axes), {(1, 2)})
        self.assertEqual(
            _legend(axes),
            [
                "10 GB/s, along the arrow",
                "25 GB/s each way",
                "50 GB/s, along the arrow",
                "no line: through the host, 10 GB/s",
            ],
        )

    @parameterized.parameters(((0, 1, 2),), ((2, 1, 0),))
    def test_one_way_links_are_arrows(self, ring: tuple[int, int, int]):
        a, b, c = ring
        pairs = {(a, b), (b, c), (c, a)}
        machine = _machine(3, _separate_wires(dict.fromkeys(pairs, 25e9)))
        axes = _machine_axes(machine)
        self.assertEqual(_arrows(axes), pairs)
        self.assertEmpty(_joined_pairs(axes))
        detours = "no line, or against the arrow: through the host, 10 GB/s"
        self.assertEqual(_legend(axes), ["25 GB/s, along the arrow", detours])

    def test_a_wire_for_both_directions_has_no_speed_each_way(self):
        half = [("wire", 20e9)]
        machine = _machine(
            3, {(0, 1): half, (1, 0): half, **_separate_wires({(1, 2): 5e9, (2, 1): 5e9})}
        )
        axes = _machine_axes(machine)
        self.assertEqual(_joined_pairs(axes), {(0, 1), (1, 2)})
        self.assertEqual(_legend(axes)[:2], ["5 GB/s each way", "20 GB/s, one way at a time"])

    def test_the_legend_has_the_slowest_link_via_the_host(self):
        wires = _separate_wires({(0, 1): 25e9, (1, 0): 25e9, (1, 2): 25e9, (2, 1): 25e9})
        machine = _machine(3, wires, host=lambda source, target: (4 + source) * 1e9)
        self.assertEqual(
            _legend(_machine_axes(machine))[-1], "no line: through the host, 4 GB/s or more"
        )

    def test_packs_on_the_same_tree_share_a_picture(self):
        machine = preset("pcie")
        schedule = algorithms.make_plan("ring", machine, 800, 8)
        _, *trees = _draw(schedule, machine).axes
        self.assertEqual([axes.get_title() for axes in trees][1], "packs 1, 5\n200 B")

    def test_many_trees(self):
        orders = itertools.islice(itertools.permutations(range(5)), 34)
        chains = [
            CopyTree(tuple(dict(itertools.pairwise((*order, None)))[device] for device in range(5)))
            for order in orders
        ]
        figure = _draw(in_turn(cut(3400, 34), chains), preset("pcie", 5))
        self.assertLen(figure.axes, 1 + 32)
        self.assertStartsWith(figure.subfigs[1].get_suptitle(), "34 copy trees, 32 of them shown")

    @parameterized.parameters(1, 2, 3)
    def test_few_devices(self, devices: int):
        schedule, machine = _plan("shared_memory", "ring", devices)
        self.assertLen(_draw(schedule, machine).axes, 1 + devices)

    def test_well_joined_devices_are_neighbours(self):
        machine = preset("dgx1")
        neighbours = _neighbours(_machine_axes(machine))
        self.assertLen(neighbours, 8)
        self.assertEqual({machine.bandwidth(*pair) for pair in neighbours}, {50e9})

    def test_directly_joined_devices_are_neighbours(self):
        # The host is as fast as the links of this ring, but still the longer path.
        ring = [(0, 2), (2, 4), (4, 1), (1, 3), (3, 5), (5, 0)]
        speeds = {pair: 10e9 for a, b in ring for pair in ((a, b), (b, a))}
        machine = _machine(6, _separate_wires(speeds))
        self.assertEqual(
            _neighbours(_machine_axes(machine)), {(min(pair), max(pair)) for pair in ring}
        )


class SaveTest(absltest.TestCase):
    def test_writes_a_picture_with_something_in_it(self):
        from matplotlib import image

        machine = preset("pcie")
        schedule = algorithms.make_plan("hierarchical_copy", machine, 10**8)
        figure = draw_trees(schedule, machine, "a title")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.png"
            save_figure(figure, path)
            self.assertLess(path.stat().st_size, 300_000)
            pixels = image.imread(path)
        self.assertGreater(pixels.shape[1], 800)
        self.assertGreater(len({tuple(pixel) for row in pixels[::9] for pixel in row}), 20)

    def test_a_long_title_is_not_clipped(self):
        figure = plot._make_figure(
            9, 5, "auto: packed_trees on measured 3 CPU devices of " + "x " * 60
        )
        figure.draw_without_rendering()
        (title,) = [text for text in figure.texts if "measured" in text.get_text()]
        extent = title.get_window_extent()
        self.assertGreaterEqual(extent.x0, 0)
        self.assertLessEqual(extent.x1, figure.bbox.width)

    def test_names_are_not_read_as_formulas(self):
        odd = r"$\x$"
        wire = [Resource(odd, 1e9)]
        machine = Topology.from_routes(odd, 2, [Route(0, 1, wire), Route(1, 0, wire)])
        schedule = algorithms.make_plan("ring", machine, 10**6)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("png", "svg"):
                path = pathlib.Path(folder) / f"a.{kind}"
                save_figure(draw_trees(schedule, machine, odd), path)
                self.assertGreater(path.stat().st_size, 1000)


if __name__ == "__main__":
    absltest.main()
