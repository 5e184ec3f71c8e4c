"""The package's rooms are as the documentation draws them, and files can be read in one go."""

from __future__ import annotations

import ast
import pathlib
import re

from absl.testing import absltest

from tfcdo.doctor import probe

_ROOT = pathlib.Path(__file__).absolute().parents[1]
_FOLDERS = ("docs", "examples", "pip_package", "tests", "tfcdo", "tools")
_MOST_LINES = 600
# How a longer file begins the sentence that says why, in a comment or in its docstring.
_REASON = "Longer than 600 lines"


def _names(line: str) -> set[str]:
    return set(re.findall(r"[a-z_]+", line))


class RoomsTest(absltest.TestCase):
    def test_the_doctor_asks_for_the_tensorflow_that_the_package_asks_for(self):
        settings = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (oldest,) = re.findall(r'"tensorflow>=([0-9.]+)"', settings)
        self.assertEqual(probe.OLDEST_TENSORFLOW, tuple(map(int, oldest.split("."))))

    def test_the_drawing_has_the_layers_that_import_linter_keeps(self):
        settings = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (contract,) = re.findall(r"^layers = (\[.*?\n\])", settings, re.MULTILINE | re.DOTALL)
        layers = [_names(layer) for layer in ast.literal_eval(contract)]
        page = (_ROOT / "docs/architecture.md").read_text(encoding="utf-8")
        _, drawing, _ = re.split("The (?:rooms|layers) of the package", page)[1].split("```", 2)
        drawn = [_names(re.split(r" {2,}", line)[0]) for line in drawing.splitlines()[1:]]
        self.assertEqual(layers, drawn)


class FileSizesTest(absltest.TestCase):
    def test_longer_files_state_their_reason(self):
        paths = [path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py")]
        self.assertNotEmpty(paths)
        texts = {str(path): path.read_text(encoding="utf-8") for path in paths}
        long = [path for path, text in texts.items() if text.count("\n") > _MOST_LINES]
        without = [path for path in long if _REASON not in texts[path]]
        self.assertEmpty(without, f"Divide these files, or begin a comment in them '{_REASON}'")


if __name__ == "__main__":
    absltest.main()
