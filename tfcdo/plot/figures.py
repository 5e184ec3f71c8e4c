"""Makes, colours and saves the figures that plans are drawn on."""

from __future__ import annotations

import io
import pathlib
import textwrap

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

Color = tuple[float, float, float]

_DPI = 100
# Width of a title in its bold font.
_LETTERS_PER_INCH = 7.5
# The part of a colour that is left where a sum is on its way down.
_PALE = 0.45


def make_figure(width: float, height: float, title: str) -> Figure:
    """Makes an empty figure."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    wrapped = textwrap.fill(title, round(_LETTERS_PER_INCH * width))
    figure.suptitle(wrapped, fontsize=14, fontweight="bold", parse_math=False)
    return figure


def device_colors(num_devices: int) -> list[Color]:
    """Chooses a colour for each device."""
    if num_devices <= 8:
        colormap = matplotlib.colormaps["tab10"]
        # Grey is for the machine, and olive is next to it.
        numbers = [0, 1, 2, 3, 4, 5, 6, 9][:num_devices]
    else:
        colormap = matplotlib.colormaps["turbo"].resampled(num_devices)
        numbers = [*range(num_devices)]
    return [(red, green, blue) for red, green, blue, _ in map(colormap, numbers)]


def make_paler(color: Color) -> Color:
    """Returns the colour of a pack on its way down the tree, given its colour on the way up."""
    red, green, blue = (1 - _PALE * (1 - part) for part in color)
    return red, green, blue


def save_figure(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure to a file, .svg or .png; the same plan gives the same file."""
    _fix_layout(figure)
    if path.suffix == ".svg":
        for artist in figure.findobj():
            artist.set_clip_on(False)  # Nothing sticks out, and clip paths are named by address.
        with matplotlib.rc_context({"svg.hashsalt": "tfcdo"}):
            figure.savefig(path, metadata={"Date": None})
        return
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=_DPI)
    # A palette is enough for lines and a few colours, and a third of the bytes.
    Image.open(pixels).convert("RGB").quantize(256).save(path, optimize=True)


def _fix_layout(figure: Figure) -> None:
    """Lays the figure out, to a millionth: the solver's last bits depend on addresses in memory."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((round(left, 6), round(bottom, 6), round(width, 6), round(height, 6)))
