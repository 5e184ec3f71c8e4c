import compileall
import runpy
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import warm_python
from absl.testing import absltest

# Not resolve(): Bazel lays out links, and pip_package lies beside tests only in its layout.
_PIP_PACKAGE = Path(__file__).absolute().parents[2] / "pip_package"

# The warm process has imported the tfcdo that is being worked on, which is in this folder, too.
_FROM_ZIP = """
import sys
sys.path[0] = zipped
for name in [name for name in sys.modules if name.split(".")[0] == "tfcdo"]:
    del sys.modules[name]
"""


def _load(name: str) -> Any:
    return types.SimpleNamespace(**runpy.run_path(str(_PIP_PACKAGE / f"{name}.py")))


class WheelTest(absltest.TestCase):
    folder: Path
    wheel: Path

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = Path(cls.enter_context(tempfile.TemporaryDirectory()))
        cls.wheel, _ = _load("build_wheel").build(cls.folder / "dist")

    def test_holds_the_package_and_nothing_else(self):
        names = zipfile.ZipFile(self.wheel).namelist()
        for path in ("__init__.py", "py.typed", "plan/copy_tree.py", "cli/doctor.py"):
            self.assertIn(f"tfcdo/{path}", names)
        package = [name for name in names if name.startswith("tfcdo/")]
        self.assertEqual({Path(name).suffix for name in package}, {".py", ".json", ".typed"})
        self.assertLen({name.split("/")[0] for name in names}, 2)

    def test_works_without_sources_from_a_zip(self):
        package = self.folder / "compiled"
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(package)
        compileall.compile_dir(package, quiet=1, legacy=True)
        zipped = package.with_suffix(".zip")
        with zipfile.ZipFile(zipped, "w") as archive:
            for path in package.rglob("tfcdo/**/*.*"):
                if path.suffix != ".py":
                    archive.write(path, path.relative_to(package))
        script = f"zipped = {str(zipped)!r}{_FROM_ZIP}{_load('check_wheel').SCRIPT}"
        done = warm_python.run("-c", script + "print(tfcdo.__file__)")
        self.assertEqual(done.returncode, 0, done.stderr)
        init = str(zipped / "tfcdo" / "__init__.pyc")
        self.assertEqual(done.stdout.splitlines(), ["6.0 6.0 6.0", init])

    def test_a_broken_wheel_is_told_from_a_good_one(self):
        broken = self.folder / self.wheel.name
        version = b'__version__ = "another"\n'
        with zipfile.ZipFile(self.wheel) as source, zipfile.ZipFile(broken, "w") as target:
            for name in source.namelist():
                target.writestr(name, version if name == "tfcdo/version.py" else source.read(name))
        check = str(_PIP_PACKAGE / "check_wheel.py")
        result = warm_python.run_cold(check, "--borrow-dependencies", str(broken))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("tfcdo.__version__ and the wheel's metadata differ", result.stderr)


if __name__ == "__main__":
    absltest.main()
