"""The documentation: every code block runs or is checked, every link leads somewhere."""

import ast
import contextlib
import doctest
import importlib
import io
import os
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator
from unittest import mock

import cli_testing
import click
import numpy as np
import tensorflow as tf
import testing_utils as tu
from absl.testing import absltest, parameterized

import tfcdo
from tfcdo.cli import commands

_ROOT = pathlib.Path(__file__).absolute().parents[1]
_OTHERS = (_ROOT / "README.md", _ROOT / ".github" / "CONTRIBUTING.md")
_PAGES = {path.name: path for path in (*_OTHERS, *sorted((_ROOT / "docs").glob("*.md")))}
_TEXTS = {name: path.read_text(encoding="utf-8") for name, path in _PAGES.items()}
_FENCE = re.compile(r"^```(\{?[\w-]*\}?)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
# What is not code, or is taken from a file that has a test of its own.
_NOT_CODE = {"text", "yaml", "{toctree}", "{eval-rst}", "{literalinclude}"}
# Before a block of Python that cannot run here, with the reason: its names are looked up instead.
_NOT_RUN = "<!-- not run: "
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
_ELSEWHERE = {"bazel", "export", "git", "srun"}


def _blocks(page: str) -> Iterator[tuple[str, str, bool]]:
    """Yields each block's language, its text, and whether the page lets it run here."""
    for found in _FENCE.finditer(_TEXTS[page]):
        before = _TEXTS[page][: found.start()].rstrip().split("\n")[-1]
        yield found[1], found[3], not before.startswith(_NOT_RUN)


def _commands(block: str) -> Iterator[tuple[str, str]]:
    """The commands after the prompts of a block, and the output below each."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command = f"{command[:-1]} {more}"
        yield re.sub(r"\s+#.*", "", command), output


class CodeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(os.chdir, pathlib.Path.cwd())
        os.chdir(self.enter_context(tempfile.TemporaryDirectory()))
        self.enter_context(tu.kernels_for("GPU"))
        # A strategy without devices takes all eight, whose traces take minutes.
        few = tf.config.list_logical_devices("CPU")[:2]
        default = "tensorflow.python.distribute.mirrored_strategy.all_local_devices"
        self.enter_context(mock.patch(default, return_value=few))
        pathlib.Path("docs").mkdir()

    @parameterized.parameters(*_PAGES)
    def test_python(self, page: str):
        names: dict[str, object] = {"__name__": "page"}
        for language, text, runs in _blocks(page):
            self.assertIn(language, {"python", "pycon", "console", "diff", *_NOT_CODE})
            if language == "python" and not runs:
                self.check_names(text)
            elif language == "python":
                few = text.replace("_virtual_cpus(4)", "_virtual_cpus(2)")
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(few, page, "exec", dont_inherit=True), names)
            elif language == "diff":
                after = re.sub(r"^-.*\n|^[ +]", "", text, flags=re.MULTILINE)
                names |= {"inputs": np.ones([64, 8]), "targets": np.ones([64, 1])}
                exec(compile(after, page, "exec"), names)
            elif language == "pycon":
                told: list[str] = []
                test = doctest.DocTestParser().get_doctest(text, names, page, page, 0)
                runner = doctest.DocTestRunner(verbose=False, optionflags=_FLAGS)
                runner.run(test, out=told.append, clear_globs=False)
                names.update(test.globs)
                self.assertEqual((runner.failures, runner.tries > 0), (0, True), "".join(told))

    def check_names(self, source: str) -> None:
        """Looks up what a block uses of modules that it need not import itself."""
        modules = {"tf": tf, "tfcdo": tfcdo}
        found = 0
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] in modules:
                eval(ast.unparse(node), dict(modules))
                found += 1
        self.assertGreater(found, 0, source)

    @parameterized.parameters(*_PAGES)
    def test_commands(self, page: str):
        for language, text, _ in _blocks(page):
            if language == "console":
                found = list(_commands(text))
                self.assertNotEmpty(found, text)
                for command, output in found:
                    with self.subTest(command):
                        self.check_command(shlex.split(command), output)

    def check_command(self, words: list[str], output: str) -> None:
        program, *arguments = words
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (_ROOT / "Makefile").read_text(), re.MULTILINE)
            self.assertContainsSubset([word for word in arguments if "=" not in word], targets)
        elif program == "pip":
            settings = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
            for wanted in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
                for extra in wanted.split(","):
                    self.assertRegex(settings, rf"(?m)^{extra} = \[")
        elif program.endswith("python"):
            (file, *_) = (argument for argument in arguments if argument.endswith(".py"))
            self.assertTrue((_ROOT / file).exists(), arguments)
        elif program == "tfcdo":
            self.check_tfcdo(arguments, output)
        else:
            self.assertIn(program, _ELSEWHERE)

    def check_tfcdo(self, arguments: list[str], output: str) -> None:
        if arguments[0] == "plan" and output.strip():
            # It needs no TensorFlow and less than a second.
            result = cli_testing.run_tfcdo(*arguments)
            self.assertEqual(result.status, 0, result.errors)
            matches = doctest.OutputChecker().check_output(output, result.output, _FLAGS)
            self.assertTrue(matches, f"the page has\n{output}\nand this is\n{result.output}")
        elif not arguments[0].startswith("-"):
            command = commands.tfcdo.get_command(click.Context(commands.tfcdo), arguments[0])
            command.make_context(arguments[0], [_example(word) for word in arguments[1:]])


def _example(word: str) -> str:
    """A script that is there, where a page names the reader's, and a number for a variable."""
    if word.endswith(".py"):
        return str(_ROOT / "examples" / "multi_worker.py")
    return re.sub(r"\$\{.*?\}", "0", word)


class LinksTest(parameterized.TestCase):
    @parameterized.parameters(*_PAGES)
    def test_links_lead_somewhere(self, page: str):
        for link in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", _TEXTS[page])):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (_PAGES[page].parent / path) if path else _PAGES[page]
            self.assertTrue(target.exists(), f"{page} links to {link}")
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
                # As on GitHub, and by myst_heading_anchors.
                anchors = [re.sub(r"[^\w\- ]", "", one.strip().lower()) for one in headings]
                self.assertIn(anchor, [one.replace(" ", "-") for one in anchors], link)

    def test_each_page_is_in_the_table_of_contents(self):
        listed = re.findall(r"^(?:[A-Z][a-z ]+<)?([a-z-]+)>?$", _TEXTS["index.md"], re.MULTILINE)
        pages = {name.removesuffix(".md") for name in _PAGES if name[0].islower()}
        self.assertCountEqual(listed, pages - {"index"})


class ReferenceTest(absltest.TestCase):
    def test_every_public_name_is_in_the_reference(self):
        module, listed = "", set()
        for line in _TEXTS["api.md"].splitlines():
            if found := re.fullmatch(r"\.\. currentmodule:: (\S+)", line):
                module = found[1]
            elif found := re.fullmatch(r"   (\w[\w.]*)|\.\. data:: (\w+)", line):
                listed.add(f"{module}.{found[1] or found[2]}")
        packages = (tfcdo, tfcdo.exchange, tfcdo.keras, tfcdo.plan, tfcdo.plot, tfcdo.topology)
        public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
        public -= {"tfcdo.__version__", *(f"tfcdo.{name}" for name in tfcdo._PACKAGES)}
        self.assertEmpty(public - listed)

    def test_messages_are_those_that_are_raised(self):
        """Each heading that is a message is in the source of tfcdo or TensorFlow, or in a page."""
        tensorflow = pathlib.Path(tf.__file__).parent / "python"
        files = [*(_ROOT / "tfcdo").rglob("*.py"), *tensorflow.glob("distribute/*.py")]
        files.append(tensorflow / "ops" / "custom_gradient.py")
        said = "\n".join(text for file in files for text in _strings(file))
        said += _TEXTS["compat.md"]
        headings = re.findall(r"(?m)^### `+ ?(.+?)`+$", _TEXTS["troubleshooting.md"])
        self.assertGreater(len(headings), 9)
        for heading in headings:
            for piece in heading.split("..."):
                self.assertTrue(piece.strip(" :,") in said, heading)


def _strings(file: pathlib.Path) -> Iterator[str]:
    """The string constants of a file, those that are written in parts as one."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# virtual_devices is no case: its example must come before TensorFlow starts.
_MODULES = sorted(
    ".".join(file.relative_to(_ROOT).with_suffix("").parts)
    for file in (_ROOT / "tfcdo").rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8") and file.stem != "virtual_devices"
)


class DocstringsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(tu.kernels_for("GPU"))

    @parameterized.parameters(*_MODULES)
    def test_examples_of(self, name: str):
        told: list[str] = []
        runner = doctest.DocTestRunner(verbose=False)
        public = {"tfcdo": tfcdo, **{one: getattr(tfcdo, one) for one in tfcdo.__all__}}
        module = importlib.import_module(name)
        for examples in doctest.DocTestFinder().find(module, extraglobs=public):
            runner.run(examples, out=told.append)
        self.assertEqual(runner.failures, 0, "".join(told))
        self.assertGreater(runner.tries, 0, f"{name} has no example")


if __name__ == "__main__":
    absltest.main()
