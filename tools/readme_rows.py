"""Measures the table of README.md: how far weights are from one-device training.

    python tools/readme_rows.py

The trainings are some of docs/compat.md's. Each runs with TensorFlow's strategy and with tfcdo's.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import tfcdo

README = pathlib.Path(__file__).absolute().parents[1] / "README.md"
BEGIN, END = "<!-- made by tools/readme_rows.py: begin -->", "<!-- end -->"
# The names of trainings in `training_cases`, and in README.md.
ROWS = {
    "`global_clipnorm`": "`global_clipnorm`",
    "`gradient_accumulation_steps`": "`gradient_accumulation_steps`",
    "`Dropout`": "`Dropout`",
    "a last batch of 7 examples, a dense model": "a last batch that does not divide",
    "sentences with a mask": "sentences with a mask",
}


def cell(training: Any, library: str) -> str:
    """Returns the largest difference of weights over all numbers of devices, or the error."""
    import training_runs

    differences = [training_runs.differences(training, library, n) for n in training.counts]
    for one in differences:
        if isinstance(one, str):
            return one.partition(":")[0]
    return f"{max(one[0] for one in differences):.0e}"


def main() -> None:
    """Measures, and replaces the table in README.md."""
    tfcdo.configure_virtual_cpus(5)
    import keras
    import tensorflow as tf
    import training_cases

    trainings = {one.name: one for one in training_cases.TRAININGS}
    lines = [
        f"| Keras {keras.__version__} | TensorFlow {tf.__version__} | tfcdo |",
        "|---|---|---|",
    ]
    for name, label in ROWS.items():
        cells = [cell(trainings[name], library) for library in ("TensorFlow", "tfcdo")]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    text = README.read_text(encoding="utf-8")
    table = "\n".join([BEGIN, *lines, END])
    new, count = re.subn(f"{BEGIN}.*?{END}", lambda _: table, text, count=1, flags=re.DOTALL)
    if not count:
        raise ValueError(f"{README} has no lines {BEGIN} and {END}")
    README.write_text(new, encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
