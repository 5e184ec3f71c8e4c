"""Sets simulated times beside measured ones: a section of docs/performance.md.

    python tools/performance_predict.py docs/performance.md              # measures, some minutes
    python tools/performance_predict.py docs/performance.md 4.json 8.json

The files are what `tfcdo bench --predict -g 4 --json 4.json` has written.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from performance_sections import bench
from performance_sections import write_section

TITLE = "## Predicted beside measured"
_NUMBERS_OF_DEVICES = (4, 8)
_LEAST_RATIO, _MOST_RATIO = 0.7, 1.4
_MOST_LOSS = 0.1


def section(runs: Sequence[Mapping[str, Any]]) -> str:
    """Writes the section.

    Args:
      runs: what `tfcdo bench --predict --json` wrote, one for each number of devices.

    Returns:
      Markdown.
    """
    machine = runs[0]["machine"]
    lines = [
        TITLE,
        "",
        f"`tfcdo bench --predict`, on virtual CPU devices of {machine['processor']} with "
        f"{machine['cores']} cores, on {runs[0]['date'][:10]}. Before each size the machine is "
        "measured, for some seconds: what it adds, packs and starts; then each algorithm is "
        "simulated with that, and timed. Algorithms with the same copy trees share a row. *Loss*: "
        "how much slower what `auto` takes is than the fastest. *Ranked alike*: the part of the "
        "pairs of rows that "
        f"simulation and clock order alike. Wanted: a median ratio from {_LEAST_RATIO} to "
        f"{_MOST_RATIO}, and a loss below {_MOST_LOSS:.0%} at every size.",
        "",
    ]
    for found in runs:
        lines += _one_run(found)
    return "\n".join(lines).rstrip() + "\n"


def _one_run(found: Mapping[str, Any]) -> list[str]:
    ratio, loss = found["median_ratio"], max(size["loss"] for size in found["sizes"])
    good = _LEAST_RATIO <= ratio <= _MOST_RATIO and loss < _MOST_LOSS
    lines = [
        f"{found['devices']}: median of simulated over measured {ratio:.2f}, the most that `auto` "
        f"loses {loss:.0%}: {'met' if good else '**missed**'}.",
        "",
        "| MB | algorithm | packs | simulated ms | measured ms | ± | ratio | ranked alike |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for size in found["sizes"]:
        for position, one in enumerate(size["predictions"]):
            cells = [
                f"{one['size'] / 1e6:.1f}",
                ", ".join(f"**{name}**" if name == "auto" else name for name in one["names"]),
                str(one["num_packs"]),
                *(f"{one[name] * 1e3:.2f}" for name in ("simulated", "measured", "spread")),
                f"{one['ratio']:.2f}",
                f"{size['agreement']:.0%}" if position == 0 else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main(path: pathlib.Path, files: Sequence[pathlib.Path] = ()) -> None:
    """Measures, or reads what was measured, and writes the section.

    Args:
      path: the page.
      files: what earlier runs wrote; none to run now.
    """
    if files:
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    else:
        runs = [bench(["--predict", "-g", str(count)]) for count in _NUMBERS_OF_DEVICES]
    write_section(path, section(runs))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), [pathlib.Path(name) for name in sys.argv[2:]])
