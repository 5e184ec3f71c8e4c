from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfcdo.bench import measure
from tfcdo.bench.devices import ChosenDevices
from tfcdo.plot import bench


def _measurement(name: str, kind: str, seconds: float, wrong: int = 0) -> measure.Measurement:
    return measure.Measurement("w", 4000, 1000, "float32", 4, name, kind, seconds, 0.0, 0.0, wrong)


_DEVICES = ChosenDevices(("/cpu:0",) * 4, "4 devices", True)


class PlotTest(tf.test.TestCase):
    def test_lines_leave_out_times_below_their_spread(self):
        # 4000 bytes over 4 devices: busbw is 6000 bytes over the time.
        times = ((1e-6, 0.9e-6), (1e-6, 1.1e-6), (-1e-6, 0.0), (3e-6, 0.0))
        measured = [
            dataclasses.replace(
                _measurement("tfcdo.X", "tfcdo", seconds), spread=spread, size=4000 + index
            )
            for index, (seconds, spread) in enumerate(times)
        ]
        figure: Any = bench.draw(measured, _DEVICES)
        (line,) = figure.axes[0].lines
        self.assertAllClose(line.get_ydata(), [6.0, math.nan, math.nan, 2.0], rtol=1e-2)

    def test_error_bars_are_as_long_as_the_spread(self):
        measured = dataclasses.replace(_measurement("tfcdo.X", "tfcdo", 5e-3), spread=2e-3)
        figure: Any = bench.draw([measured], _DEVICES)
        (axes,) = figure.axes
        (bar,) = axes.patches
        self.assertAllClose(bar.get_width(), 5.0)
        ((ends,),) = [bars.get_segments() for bars in axes.collections]
        self.assertAllClose(ends[:, 0], [4.0, 6.0])


if __name__ == "__main__":
    tf.test.main()
