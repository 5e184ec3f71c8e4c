"""Files of pictures."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from absl.testing import absltest, parameterized

from tfcdo.plan import algorithms
from tfcdo.plot.figures import make_figure, save_figure
from tfcdo.plot.gantt import draw_gantt
from tfcdo.plot.trees import draw_trees
from tfcdo.topology.links import Resource
from tfcdo.topology.presets import preset
from tfcdo.topology.routes import Route
from tfcdo.topology.topology import Topology


class SaveTest(parameterized.TestCase):
    @parameterized.parameters(draw_trees, draw_gantt)
    def test_writes_a_picture_with_something_in_it(self, draw: Callable[..., Any]):
        from matplotlib import image

        machine = preset("pcie")
        schedule = algorithms.make_schedule("hierarchical_copy", machine, 10**8)
        figure = draw(schedule, machine, "a title")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.png"
            save_figure(figure, path)
            self.assertLess(path.stat().st_size, 300_000)
            pixels = image.imread(path)
        self.assertGreater(pixels.shape[1], 800)
        self.assertGreater(len({tuple(pixel) for row in pixels[::9] for pixel in row}), 20)

    def test_a_long_title_is_not_clipped(self):
        figure = make_figure(9, 5, "auto: packed_trees on measured 3 CPU devices of " + "x " * 60)
        figure.draw_without_rendering()
        (title,) = [text for text in figure.texts if "measured" in text.get_text()]
        extent = title.get_window_extent()
        self.assertGreaterEqual(extent.x0, 0)
        self.assertLessEqual(extent.x1, figure.bbox.width)

    @parameterized.parameters(draw_trees, draw_gantt)
    def test_names_are_not_read_as_formulas(self, draw: Callable[..., Any]):
        odd = r"$\x$"
        wire = [Resource(odd, 1e9)]
        machine = Topology.from_routes(odd, 2, [Route(0, 1, wire), Route(1, 0, wire)])
        schedule = algorithms.make_schedule("ring", machine, 10**6)
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("png", "svg"):
                path = pathlib.Path(folder) / f"a.{kind}"
                save_figure(draw(schedule, machine, odd), path)
                self.assertGreater(path.stat().st_size, 1000)


if __name__ == "__main__":
    absltest.main()
