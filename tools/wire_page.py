"""Makes docs/wire.md and its picture: the text from here, the numbers by training.

python tools/wire_page.py docs/wire.md
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from tfcdo import virtual_devices

_TEXT = pathlib.Path(__file__).with_name("wire_page.md")
_STYLES = {"float32": "k-", "bfloat16": "C0--", "bfloat16, error feedback": "C0-"}


def table(accuracies: Mapping[str, Mapping[str, float]]) -> str:
    """Writes accuracies as a table."""
    models = list(next(iter(accuracies.values())))
    lines = [f"| wire | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    for wire, by_model in accuracies.items():
        cells = [
            f"{by_model[model]:.2%} ({100 * (by_model[model] - accuracies['float32'][model]):+.2f})"
            for model in models
        ]
        lines.append(f"| {wire} | {' | '.join(cells)} |")
    return "\n".join(lines)


def final_table(losses: Mapping[str, np.ndarray]) -> str:
    """Writes how far each descent is above the minimum at its start and at its end."""
    lines = ["| wire | first step | last step |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {wire} | {own[0]:.3g} | {own[-1]:.3g} |" for wire, own in losses.items())]
    )


def draw(losses: Mapping[str, np.ndarray]) -> Figure:
    """Draws descents, by wire, as losses above the minimum over the steps."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for wire, own in losses.items():
        if wire in _STYLES:
            axes.loglog(np.arange(1, len(own) + 1), own, _STYLES[wire], label=wire, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss above its minimum")
    axes.set_title("SGD where devices' gradients are large and their sum is small")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main(arguments: Sequence[str]) -> None:
    """Trains, and writes the page and the picture next to it."""
    page = pathlib.Path(arguments[0])
    import wire_trainings

    virtual_devices.configure_virtual_cpus(wire_trainings.NUM_DEVICES)
    accuracies = {
        wire: {
            "digits (the demo's)": wire_trainings.digits_accuracy(wire),
            "two-tower recommender": wire_trainings.recommender_accuracy(wire),
        }
        for wire in wire_trainings.WIRES
    }
    losses = {wire: wire_trainings.badly_scaled_losses(wire) for wire in wire_trainings.WIRES}
    picture = page.with_name("wire.png")
    draw(losses).savefig(picture, dpi=100)
    text = _TEXT.read_text(encoding="utf-8")
    text = text.replace("{accuracies}", table(accuracies)).replace("{losses}", final_table(losses))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
