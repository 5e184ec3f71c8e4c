"""`tfcdo plan`: tables, files, pictures and refusals."""

import dataclasses
import errno
import os
import re
import sys
from unittest import mock

import warm_python
from absl.testing import absltest, parameterized
from cli_testing import CommandTestCase, rows_of_table, run_tfcdo
from rich import console as rich_console

from tfcdo.cli import options
from tfcdo.log import format_seconds
from tfcdo.plan import algorithms, simulator
from tfcdo.plan.copy_tree import star
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.plan import plan_of_bytes
from tfcdo.topology import measurement
from tfcdo.topology.links import Link, Resource
from tfcdo.topology.presets import preset
from tfcdo.topology.topology import Topology

_TABLE = """\
        GPU0    GPU1    CPU Affinity    NUMA Affinity
GPU0     X      NV4     0-15            0
GPU1    NV4      X      0-15            0
"""


def _two_devices(name: str, wire: str) -> str:
    """Returns the file of a machine whose two devices share a wire."""
    links = Link(0, 1, 0.0, (0,)), Link(1, 0, 0.0, (0,))
    return Topology(name, 2, (Resource(wire, 1e9),), links).to_json()


class PlanTest(CommandTestCase):
    def test_compares_all_algorithms(self):
        dgx1 = preset("dgx1")
        output = self.output_of("plan", "--topology", "dgx1", "--bytes", "100MB")
        self.assertIn("100 MB on each of 8 devices of dgx1", output)
        # The bandwidth bound is 1.148 ms: 14 times the data over 48 ways of 25 GB/s and two of 10
        # via the host.
        self.assertIn("Bound: 1.196 ms", output)
        rows = rows_of_table(output)
        *names, auto = rows
        self.assertEqual((*names, "auto"), algorithms.ALGORITHMS)
        # On 8 packs, 100 MB / 8 on each of 4 of them.
        self.assertEqual(rows["hierarchical_copy"][:4], ["8", "0→2", "50.0 MB", "2.606 ms"])
        self.assertEqual(rows["one_device"][:3], ["1", "host 0→1", "300 MB"])
        ratios = {name: float(cells[-1]) for name, cells in rows.items()}
        self.assertEqual(ratios[auto], min(ratios.values()))
        self.assertEqual(auto, f"auto: {min(names, key=ratios.__getitem__)}")
        ring = algorithms.make_plan("ring", dgx1, 10**8)
        times = simulator.robust_seconds(ring, dgx1), simulator.simulate(ring, dgx1).seconds
        self.assertEqual(rows["ring"][3:5], [*map(format_seconds, times)])
        # The same from a measurement in a file; and it fits.
        saved = self.folder / "machine.json"
        measurement.save(measurement.Measured(dgx1, "2026-01-02", ((1000, 1e-9),)), saved)
        console = rich_console.Console(width=80)
        with mock.patch.object(options, "make_console", lambda stderr=False: console):
            output = self.output_of("plan", "-t", str(saved))
        self.assertNotIn("…", output)
        self.assertLessEqual(max(map(len, output.splitlines())), 80)
        for shown in (auto, "host 0→1", "18.51 ms", "15.470", "175 MB", "18.41 ms"):
            self.assertIn(shown, output)

    def test_one_device_needs_nothing(self):
        output = self.output_of("plan", "--topology", "nvswitch:1", "-b", "1KB")
        self.assertIn("All-reduce of 1.00 kB on the only device of nvswitch", output)
        self.assertEqual(rows_of_table(output)["ring"], ["1", "none", "0 B", "0 s", "0 s", "-"])

    def test_a_machine_from_a_table(self):
        saved = self.folder / "topo.txt"
        saved.write_text(_TABLE, encoding="utf-8-sig")
        output = self.output_of("plan", "-t", str(saved))
        # 100 MB up and down at 4 x 25 GB/s, and twice the latency.
        milliseconds, unit = rows_of_table(output)["one_device"][3].split()
        self.assertEqual(unit, "ms")
        self.assertAlmostEqual(float(milliseconds), 2.02, delta=0.02)
        self.assertIn("on each of 2 devices", output)
        self.assertEqual(output, self.output_of("plan", "-t", "-", stdin=_TABLE))

    def test_square_brackets_in_names_are_printed_and_drawn(self):
        saved, picture = self.folder / "[y].json", self.folder / "[bold].svg"
        # With a byte order mark.
        saved.write_text(_two_devices("a [bold]b[/x]", "link [/z]"), encoding="utf-8-sig")
        output = self.output_of("plan", "-t", str(saved), "-b", "1K", "--draw", str(picture))
        self.assertIn("All-reduce of 1.02 kB on each of 2 devices of a [bold]b[/x]", output)
        self.assertIn("link [/z]", output)
        auto = list(rows_of_table(output))[-1]
        self.assertIn(f"Drew {auto} in {picture}\n", output)
        self.assertIn(f"{auto} on a [bold]b[/x]", picture.read_text(encoding="utf-8"))

    def test_the_chosen_algorithm_stands_out_and_no_word_changes(self):
        for chosen in ("ring", "auto"):
            arguments = ("plan", "-t", "pcie:2", "-b", "1MB", "-a", chosen)
            with mock.patch.dict(os.environ, FORCE_COLOR="1", TERM="xterm"):
                output = self.output_of(*arguments)
            rows = [line for line in output.partition("┼")[2].splitlines() if "│" in line]
            (bold,) = [row for row in rows if "\x1b[1m" in row]
            self.assertIn(chosen, bold)
            self.assertEqual(self.output_of(*arguments), self.output_of(*arguments[:-2]))

    def test_across_hosts(self):
        output = self.output_of(
            "plan",
            *("--hosts", "4", "--topology", "pcie:2", "--network", "1.25G", "-b", "10MB"),
            *("--exchange", "bfloat16"),
        )
        self.assertIn("across 4 hosts with 1.25 GB/s of bfloat16", " ".join(output.split()))
        rows = rows_of_table(output)
        *names, auto = rows
        self.assertEqual((*names, auto.partition(":")[0]), algorithms.ALGORITHMS)
        # 2 x 3/4 of 5 MB at 1.25 GB/s, in packs of 4 MiB; a share has a multiple of 32 values.
        self.assertIn("Bound: 6.001 ms", output)
        self.assertEqual({cells[0] for cells in rows.values()}, {"3"})


class WrongTest(CommandTestCase):
    @parameterized.parameters(
        ("--topology.*'dgx9' is neither a file nor a known machine: dgx1, .*:16", "-t", "dgx9"),
        ("num_devices of 'dgx1' must be at most 8", "-t", "dgx1:9"),
        ("'nvswitch:9999999999' is neither", "-t", "nvswitch:9999999999"),
        ("'magic'.*'packed_trees'", "-t", "dgx1", "-a", "magic"),
        ("at most 128 devices.*'pcie' has 129", "-t", "pcie:129"),
        ("'a.pdf' does not end in .png or .svg", "-t", "dgx1", "--draw", "a.pdf"),
        ("there is no folder 'no'", "-t", "dgx1", "--draw", "no/a.png"),
        ("'.*/a.png' is a folder", "-t", "dgx1", "--draw", "{folder}/a.png"),
        ("'fast' is not a bandwidth", "-t", "dgx1", "--hosts", "2", "--network", "fast"),
        ("--save and --draw are for one host", "-t", "dgx1", "--hosts", "2", "--save", "a.json"),
        ("--bytes must be at most 200 GB with", "-t", "pcie", "--hosts", "2", "-b", "201GB"),
        ("--exchange needs --hosts", "-t", "here", "--exchange", "bfloat16"),
        ("--network .*needs --hosts", "-t", "here", "--network", "12.5G"),
        ("--topology': 'here:17': at most 16 devices", "-t", "here:17"),
        ("/folder: ", "-t", "{folder}"),
    )
    def test_argument(self, pattern: str, *arguments: str):
        (self.folder / "folder" / "a.png").mkdir(parents=True)
        given = [one.replace("{folder}", str(self.folder / "folder")) for one in arguments]
        with mock.patch.dict(sys.modules, tensorflow=None):
            self.assert_refused(pattern, "plan", *given)

    @parameterized.parameters(
        (b"", "file: no table of `nvidia-smi topo -m`"),
        (b'{"name": ', "file: .*JSON"),
        (b"\n[1]", "file: not a topology"),
        (b"\xff\xfe\x00\x01", "file: expected text"),
    )
    def test_file(self, content: bytes, pattern: str):
        path = self.folder / "file"
        path.write_bytes(content)
        self.assert_refused(pattern, "plan", "-t", str(path))

    def test_closed_standard_input(self):
        with mock.patch.object(sys, "stdin", None):
            self.assert_refused("-: standard input is closed", "plan", "-t", "-")


class ProcessTest(CommandTestCase):
    def test_without_tensorflow_on_an_ascii_terminal(self):
        script = (
            "import sys, tfcdo, tfcdo.plan.algorithms, tfcdo.plot\n"
            "from tfcdo.__main__ import main\n"
            "tfcdo.topology.detect(['GPU:0', 'CPU:0'])\n"
            "print(tfcdo.__version__)\n"
            "try: main()\n"
            "finally: print('tensorflow' in sys.modules, file=sys.stderr)"
        )
        path = self.folder / "machine.json"
        path.write_text(_two_devices("réseau", "0→1"), encoding="utf-8")
        with mock.patch.dict(os.environ, PYTHONIOENCODING="ascii"):
            result = warm_python.run_cold("-c", script, "plan", "-t", str(path), "-b", "1K")
        self.assertEqual((result.returncode, result.stderr), (0, "False\n"))
        self.assertRegex(result.stdout, r"^\d+\.")
        for shown in ("r\\xe9seau", " 0->1 ", " us "):
            self.assertIn(shown, result.stdout)


class SavedTest(CommandTestCase):
    @parameterized.parameters(("packed_trees", None), ("hierarchical_copy", 3), ("auto", 1))
    def test_a_plan_that_was_saved_is_read(self, algorithm: str, num_packs: int | None):
        path, machine = self.folder / "plan.json", preset("pcie", 3)
        arguments = ["-t", "pcie:3", "-b", "10MB", "-a", algorithm, "--save", str(path)]
        arguments += ["--num-packs", str(num_packs)] if num_packs else []
        self.assertIn(f" in {path}\n", self.output_of("plan", *arguments))
        found = Evaluation.from_json(path.read_bytes())
        self.assertEqual((found.topology, found.algorithm), (machine, algorithm))
        wanted = algorithms.make_plan(found.resolved, machine, 10**7, num_packs)
        for one, other in zip(found.plan.packs, wanted.packs, strict=True):
            self.assertEqual((one.tree, one.after), (other.tree, other.after))
            [part], [wanted_part] = one.slices, other.slices
            # Elements of 4 bytes are not cut.
            self.assertEqual(part.start % 4, 0)
            self.assertLess(abs(part.start - wanted_part.start), 4)
        self.assertGreaterEqual(found.seconds, found.bound)
        ordered = simulator.simulate(found.plan, machine).seconds
        self.assertAlmostEqual(found.ordered_seconds, ordered)

    def test_a_full_disk_is_not_taken_for_standard_output(self):
        for option, name in (("--save", "plan.json"), ("--draw", "plan.svg")):
            path = self.folder / name
            path.symlink_to("/dev/full")
            result = run_tfcdo("plan", "-t", "pcie:2", "-b", "1K", option, str(path))
            expected = f"tfcdo: {path}: {os.strerror(errno.ENOSPC)}\n"
            self.assertEqual((result.status, result.errors), (1, expected))

    def test_windows_are_saved(self):
        packs = plan_of_bytes(2, [(1, star(2), i - 2 if i > 1 else None) for i in range(5)])
        plan = Evaluation(preset("pcie", 2), "auto", "packed_trees", packs, 2.0, 1.5, 1.0)
        again = Evaluation.from_json(plan.to_json())
        self.assertEqual(again.plan.packs, packs.packs)
        self.assertEqual(dataclasses.replace(again, plan=packs), plan)
        # Earlier versions wrote no windows.
        text = re.sub(', "after": [^}]*', "", plan.to_json())
        self.assertEqual({pack.after for pack in Evaluation.from_json(text).plan.packs}, {None})


if __name__ == "__main__":
    absltest.main()
