"""Draws the memory of a sharded optimizer state: the picture of docs/optimizer-state.md.

python tools/optimizer_state.py docs/optimizer-state.png
"""

from __future__ import annotations

import pathlib
import sys

from matplotlib.figure import Figure

_SLOTS = {"SGD with momentum, Lion": 1, "Adam": 2, "Adam with amsgrad": 3}
_MOST_DEVICES = 16


def bytes_per_parameter(slots: int, num_devices: int) -> float:
    """Returns the bytes on each device: weight, gradient and its share of the slots, in float32."""
    return 4 + 4 + 4 * slots / num_devices


def main(path: pathlib.Path) -> None:
    """Draws the bytes per parameter over the number of devices."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    counts = range(1, _MOST_DEVICES + 1)
    for name, slots in _SLOTS.items():
        axes.plot(counts, [bytes_per_parameter(slots, count) for count in counts], label=name)
    axes.axhline(8, color="gray", linestyle=":", label="weights and gradients")
    axes.set(xlabel="devices that share the state", ylabel="bytes per parameter", ylim=(0, 21))
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
