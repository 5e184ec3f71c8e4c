from __future__ import annotations

import compileall
import os
import runpy
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import warm_python
from absl.testing import absltest

# Not resolve(): Bazel lays out links, and pip_package lies beside tests only in its layout.
_PIP_PACKAGE = Path(__file__).absolute().parents[2] / "pip_package"

# The warm process has imported the tfcdo that is being worked on.
_WITHOUT_TFCDO = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "tfcdo"]:
    del sys.modules[name]
"""


def _load(name: str) -> Any:
    return types.SimpleNamespace(**runpy.run_path(str(_PIP_PACKAGE / f"{name}.py")))


class WheelTest(absltest.TestCase):
    folder: tempfile.TemporaryDirectory[str]
    wheel: Path
    sdist: Path

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.wheel, cls.sdist = _load("build_wheel").build(Path(cls.folder.name) / "dist")

    def test_holds_the_package_and_nothing_else(self):
        names = zipfile.ZipFile(self.wheel).namelist()
        rooms = (
            "__init__.py",
            "py.typed",
            "plan/copy_tree.py",
            "execute/interpreter.py",
            "cli/doctor.py",
        )
        self.assertContainsSubset([f"tfcdo/{room}" for room in rooms], names)
        top_level = {name.split("/")[0] for name in names}
        self.assertLen(top_level, 2)
        self.assertContainsSubset({"tfcdo"}, top_level)
        package = [name for name in names if name.startswith("tfcdo/")]
        endings = {Path(name).suffix for name in package if not name.endswith("py.typed")}
        self.assertContainsSubset(endings, {".py", ".json"})

    def test_works_without_sources_from_a_zip(self):
        package = Path(self.folder.name) / "compiled"
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(package)
        compileall.compile_dir(package, quiet=1, legacy=True)
        zipped = package.with_suffix(".zip")
        with zipfile.ZipFile(zipped, "w") as archive:
            for path in package.rglob("tfcdo/**/*.*"):
                if path.suffix != ".py":
                    archive.write(path, path.relative_to(package))
        script = _WITHOUT_TFCDO + _load("check_wheel").SCRIPT + "print(tfcdo.__file__)"
        done = subprocess.run(
            [warm_python.executable(), "-c", script],
            cwd=self.folder.name,
            env={**os.environ, "PYTHONPATH": str(zipped)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(
            done.stdout.splitlines(), ["6.0 6.0 6.0", str(zipped / "tfcdo" / "__init__.pyc")]
        )

    def test_a_broken_wheel_is_told_from_a_good_one(self):
        broken = Path(self.folder.name) / "broken"
        broken.mkdir()
        copy = broken / self.wheel.name
        with zipfile.ZipFile(self.wheel) as source, zipfile.ZipFile(copy, "w") as target:
            for item in source.infolist():
                content = source.read(item)
                if item.filename == "tfcdo/version.py":
                    content = b'__version__ = "another"\n'
                target.writestr(item, content)
        result = subprocess.run(
            [sys.executable, _PIP_PACKAGE / "check_wheel.py", "--borrow-dependencies", copy],
            capture_output=True,
            text=True,
        )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("tfcdo.__version__ and the wheel's metadata differ", result.stderr)


if __name__ == "__main__":
    absltest.main()
