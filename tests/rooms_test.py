"""The package's rooms are as the README draws them."""

from __future__ import annotations

import ast
import pathlib
import re

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).absolute().parents[1]


def _names(line: str) -> set[str]:
    """The rooms on one line of a drawing or in one layer of the contract."""
    return set(re.findall(r"[a-z_]+", line))


class RoomsTest(absltest.TestCase):
    def test_the_readme_draws_the_layers_that_import_linter_keeps(self):
        settings = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (contract,) = re.findall(r"^layers = (\[.*?\n\])", settings, re.MULTILINE | re.DOTALL)
        layers = [_names(layer) for layer in ast.literal_eval(contract)]
        readme = (_ROOT / "README.md").read_text(encoding="utf-8")
        drawing = readme[readme.index("The rooms of the package") :]
        # Each line of the drawing: the rooms, at least two spaces, and what they are.
        lines = [line[4:] for line in drawing.splitlines() if line.startswith("    ")]
        drawn = [_names(re.split(r" {2,}", line)[0]) for line in lines[: len(layers)]]
        self.assertEqual(layers, drawn)


if __name__ == "__main__":
    absltest.main()
