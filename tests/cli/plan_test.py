"""`tfcdo plan`: tables, files, pictures and refusals."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import re
import subprocess
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
_NO_SUCH_FILE = os.strerror(errno.ENOENT)


class PlanTest(CommandTestCase):
    def rows(self, *arguments: str) -> dict[str, list[str]]:
        """Returns the cells of the table by the algorithm."""
        return rows_of_table(self.output_of("plan", *arguments))

    def test_compares_all_algorithms(self):
        rows = self.rows("--topology", "dgx1", "--bytes", "100MB")
        *names, auto = rows
        self.assertEqual((*names, "auto"), algorithms.ALGORITHMS)
        # On 8 packs, 100 MB / 8 on each of 4 of them.
        self.assertEqual(rows["hierarchical_copy"][:4], ["8", "0→2", "50.0 MB", "2.606 ms"])
        self.assertEqual(rows["one_device"][:3], ["1", "host 0→1", "300 MB"])
        ratios = {name: float(cells[-1]) for name, cells in rows.items()}
        self.assertEqual(ratios[auto], min(ratios.values()))
        self.assertEqual(auto, f"auto: {min(names, key=ratios.__getitem__)}")

    def test_says_what_is_compared_and_the_bound(self):
        output = self.output_of("plan", "--topology", "dgx1", "--bytes", "25MB")
        self.assertIn("25.0 MB on each of 8 devices of dgx1", output)
        # The bandwidth bound is 286.9 µs: 14 times the data over 48 ways of 25 GB/s and two
        # of 10 via the host.
        self.assertIn("Bound: 334.3 µs", output)

    def test_one_device_needs_nothing(self):
        output = self.output_of("plan", "--topology", "nvswitch:1")
        self.assertIn("100 MB on the only device of nvswitch", output)
        row = rows_of_table(output)["ring"]
        self.assertEqual(row, ["1", "none", "0 B", "0 s", "0 s", "-"])

    def test_a_machine_from_a_file(self):
        saved = self.folder / "machine.json"
        saved.write_text(preset("dgx1").to_json(), encoding="utf-8")
        self.assertEqual(self.rows("-t", str(saved))["ring"], self.rows("-t", "dgx1")["ring"])
        table = self.folder / "topo.txt"
        table.write_text(_TABLE)
        # 100 MB up and down at 4 x 25 GB/s, and twice the latency.
        milliseconds, unit = self.rows("-t", str(table))["one_device"][3].split()
        self.assertEqual(unit, "ms")
        self.assertAlmostEqual(float(milliseconds), 2.02, delta=0.02)

    def test_a_machine_from_a_file_with_a_byte_order_mark(self):
        for text in (preset("pcie").to_json(), _TABLE):
            saved = self.folder / "machine"
            saved.write_text(text, encoding="utf-8-sig")
            self.assertIn("Bound: ", self.output_of("plan", "-t", str(saved)))

    def test_a_machine_from_standard_input(self):
        output = self.output_of("plan", "-t", "-", stdin=_TABLE)
        self.assertIn("on each of 2 devices", output)

    def test_square_brackets_in_names_are_printed(self):
        resource = Resource("link [/z]", 1e9)
        link = Link(0, 1, 0.0, (0,))
        back = Link(1, 0, 0.0, (0,))
        for name in ("[/x]", "a [bold]b"):
            machine = Topology(name, 2, (resource,), (link, back))
            saved, picture = self.folder / "[y].json", self.folder / "[bold].svg"
            saved.write_text(machine.to_json(), encoding="utf-8")
            output = self.output_of("plan", "-t", str(saved), "--draw", str(picture))
            self.assertIn(f"2 devices of {name} ", output)
            self.assertIn("link [/z]", output)
            self.assertIn(f" in {picture}\n", output)

    @parameterized.parameters(".png", ".svg")
    def test_draws(self, suffix: str):
        path = self.folder / f"picture{suffix}"
        arguments = ("-t", "pcie", "-b", "1MB", "-a", "hierarchical_copy", "--draw", str(path))
        output = self.output_of("plan", *arguments)
        self.assertIn(f"Drew hierarchical_copy in {path}", output)
        first = path.read_bytes()
        self.assertStartsWith(first, b"\x89PNG\r\n" if suffix == ".png" else b"<?xml")
        self.assertIn(b"</svg>" if suffix == ".svg" else b"IEND", first)
        self.output_of("plan", *arguments)
        self.assertEqual(path.read_bytes(), first)

    def test_says_which_algorithm_was_drawn(self):
        path = self.folder / "picture.svg"
        output = self.output_of("plan", "-t", "nvswitch:2", "-b", "8", "--draw", str(path))
        auto = algorithms.fastest_algorithm(preset("nvswitch", 2), 8)
        self.assertIn(f"Drew auto: {auto} in {path}", output)
        self.assertIn(f"auto: {auto} on nvswitch", path.read_text(encoding="utf-8"))

    @parameterized.parameters("ring", "auto")
    def test_the_chosen_algorithm_stands_out(self, chosen: str):
        with mock.patch.dict(os.environ, FORCE_COLOR="1", TERM="xterm"):
            output = self.output_of("plan", "-t", "pcie", "-b", "1MB", "-a", chosen)
        rows = [line for line in output.partition("┼")[2].splitlines() if "│" in line]
        (bold,) = [row for row in rows if "\x1b[1m" in row]
        self.assertIn(chosen, bold)

    def test_an_algorithm_alone_changes_no_word(self):
        table = self.output_of("plan", "-t", "pcie", "-b", "1MB")
        self.assertEqual(self.output_of("plan", "-t", "pcie", "-b", "1MB", "-a", "ring"), table)

    @parameterized.parameters(80, 120)
    def test_the_table_fits(self, width: int):
        console = rich_console.Console(width=width)
        with mock.patch.object(options, "make_console", lambda stderr=False: console):
            output = self.output_of("plan", "-t", "dgx1")
        self.assertNotIn("…", output)
        self.assertLessEqual(max(map(len, output.splitlines())), width)
        auto = algorithms.fastest_algorithm(preset("dgx1"), 10**8)
        for shown in (
            "ring",
            f"auto: {auto}",
            "host 0→1",
            "18.51 ms",
            "15.470",
            "175 MB",
            "18.41 ms",
        ):
            self.assertIn(shown, output)

    @parameterized.parameters((), ("--save", "a.json"), ("--draw", "a.png"))
    def test_each_schedule_is_simulated_once(self, *arguments: str):
        self.addCleanup(os.chdir, pathlib.Path.cwd())
        os.chdir(self.folder)
        machine = preset("nvswitch", 3)
        # Packed trees that are searched for are simulated, too.
        algorithms.make_plan("packed_trees", machine, 10**6)
        evaluated = simulator.robust_seconds
        with (
            mock.patch.object(algorithms, "fastest_algorithm", return_value="ring"),
            mock.patch.object(simulator, "robust_seconds", wraps=evaluated) as robust_seconds,
        ):
            self.output_of("plan", "-t", "nvswitch:3", "-b", "1MB", "-a", "ring", *arguments)
        simulated = [call.args[0] for call in robust_seconds.call_args_list]
        ring = algorithms.make_plan("ring", machine, 10**6)
        trees = [[pack.tree for pack in schedule.packs] for schedule in simulated]
        self.assertIn([pack.tree for pack in ring.packs], trees)
        self.assertLen(simulated, len(algorithms.ALGORITHMS) - 1)

    def test_k_means_the_same_as_in_nccl_tests(self):
        self.assertIn("All-reduce of 1.02 kB ", self.output_of("plan", "-t", "pcie", "-b", "1K"))
        self.assertIn("All-reduce of 1.00 kB ", self.output_of("plan", "-t", "pcie", "-b", "1KB"))

    def test_an_ascii_terminal_gets_ascii_letters(self):
        machine = Topology(
            "réseau", 2, (Resource("0→1", 1e9),), (Link(0, 1, 0.0, (0,)), Link(1, 0, 0.0, (0,)))
        )
        path = self.folder / "machine.json"
        path.write_text(machine.to_json(), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONIOENCODING": "ascii",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        result = subprocess.run(
            [sys.executable, "-m", "tfcdo.cli.main", "plan", "-t", str(path), "-b", "1K"],
            capture_output=True,
            env=environment,
            check=False,
        )
        output = result.stdout.decode("ascii")
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertIn("r\\xe9seau", output)
        self.assertIn(" 0->1 ", output)
        self.assertIn(" us ", output)


class HostsTest(CommandTestCase):
    def test_a_table(self):
        output = self.output_of(
            "plan",
            *("--hosts", "4", "--topology", "pcie", "--network", "1.25G", "-b", "10MB"),
            *("--exchange", "bfloat16"),
        )
        self.assertIn("across 4 hosts with 1.25 GB/s of bfloat16", " ".join(output.split()))
        rows = rows_of_table(output)
        *names, auto = rows
        self.assertEqual((*names, auto.partition(":")[0]), algorithms.ALGORITHMS)
        # 2 x 3/4 of 5 MB at 1.25 GB/s, in packs of 4 MiB; a share has a multiple of 32 values.
        self.assertIn("Bound: 6.001 ms", output)
        self.assertEqual({cells[0] for cells in rows.values()}, {"3"})

    @parameterized.parameters(("2KB", "2.000 s"), ("6KB", "1.524 s"))
    def test_small_packs_are_exact_as_in_training(self, size: str, bound: str):
        arguments = ("--hosts", "2", "-t", "nvswitch:2", "--network", "1K", "--exchange", "int8")
        output = self.output_of("plan", *arguments, "-b", size)
        # From 4 KiB on an element is sent in 8 bits, and a block of at most 256 has a scale of 32.
        self.assertIn(f"Bound: {bound}", output)

    def test_auto_is_that_of_training(self):
        """Each network interface has its share, so one device does not sum all packs."""
        for hosts, auto in (((), "auto: one_device"), (("--hosts", "2"), "auto: shuffle")):
            rows = rows_of_table(self.output_of("plan", "-t", "shared_memory", *hosts))
            self.assertEqual(list(rows)[-1], auto)


class WrongTest(CommandTestCase):
    @parameterized.parameters(
        ("--topology",),
        ("--topology.*'dgx9' is neither a file nor a known machine: dgx1, ", "-t", "dgx9"),
        ("'' is neither a file nor a known machine: dgx1, ", "-t", ""),
        ("num_devices of 'dgx1' must be at most 8", "-t", "dgx1:9"),
        ("num_devices must be at least 1", "-t", "nvswitch:0"),
        ("'nvswitch:9999999999' is neither", "-t", "nvswitch:9999999999"),
        ("'dgx1:many' is neither", "-t", "dgx1:many"),
        ("'100X' is not a number of bytes", "-t", "dgx1", "-b", "100X"),
        ("'0' is not a number of bytes", "-t", "dgx1", "-b", "0"),
        ("'-1' is not a number of bytes", "-t", "dgx1", "-b", "-1"),
        ("'magic'.*'packed_trees'", "-t", "dgx1", "-a", "magic"),
        ("at most 128 devices.*'nvswitch' has 512", "-t", "nvswitch:512"),
        ("at most 128 devices.*'pcie' has 129", "-t", "pcie:129"),
        ("'a.pdf' does not end in .png or .svg", "-t", "dgx1", "--draw", "a.pdf"),
        ("there is no folder 'no'", "-t", "dgx1", "--draw", "no/a.png"),
        ("--bytes': there can be at most", "-t", "dgx1", "-b", "9" * 400),
        ("--hosts", "-t", "dgx1", "--hosts", "1025"),
        ("'fast' is not a bandwidth", "-t", "dgx1", "--hosts", "2", "--network", "fast"),
        ("'0' is not a bandwidth", "-t", "dgx1", "--hosts", "2", "--network", "0"),
        ("--save and --draw are for one host", "-t", "dgx1", "--hosts", "2", "--save", "a.json"),
        ("--exchange needs --hosts", "-t", "dgx1", "--exchange", "bfloat16"),
        ("--network .*needs --hosts", "-t", "dgx1", "--network", "12.5G"),
        ("--topology': 'here:17': at most 16 devices", "-t", "here:17"),
        ("--draw are for one host", "-t", "dgx1", "--hosts", "2", "--draw", "a.png"),
    )
    def test_argument(self, pattern: str, *arguments: str):
        self.assert_refused(pattern, "plan", *arguments)

    def test_before_this_machine_is_measured(self):
        arguments = ("-t", "here", "--exchange", "bfloat16")
        with mock.patch.dict(sys.modules, tensorflow=None):
            self.assert_refused("--exchange needs --hosts", "plan", *arguments)

    @parameterized.parameters(
        (b"", "file: no table of `nvidia-smi topo -m`"),
        (b"hello\n", "GPU0"),
        (b'{"name": ', "file: .*JSON"),
        (b"{}", "file: not a topology"),
        (b"\n[1]", "file: not a topology"),
        (b'{"name": 3, "num_devices": 2, "resources": 5, "links": []}', "file: "),
        (b"     GPU0 GPU1\nGPU0 X WAT\nGPU1 WAT X\n", "line 2: row GPU0, column GPU1: .* got WAT"),
        (b"     GPU0 GPU1\nGPU0 X NV1\nGPU1 NV1\n", "line 3: row GPU1 has 1 entries for 2 GPUs"),
        (b"     GPU0 GPU1\nGPU0 X NV1\nGPU1 NV2 X\n", "line 3: .*expected NV1, .*; got NV2"),
        (b"     GPU0 GPU1\nGPU0 X NV1\nNIC0 X NV2\n", "no row GPU1"),
        (b"\xff\xfe\x00\x01", "file: expected text"),
    )
    def test_file(self, content: bytes, pattern: str):
        path = self.folder / "file"
        path.write_bytes(content)
        self.assert_refused(pattern, "plan", "-t", str(path))

    def test_closed_standard_input(self):
        with mock.patch.object(sys, "stdin", None):
            self.assert_refused("-: standard input is closed", "plan", "-t", "-")

    def test_a_folder_is_refused_as_a_file(self):
        self.assert_refused(re.escape(str(self.folder)), "plan", "-t", str(self.folder))

    def test_a_folder_is_refused_as_a_picture(self):
        path = self.folder / "a.png"
        path.mkdir()
        self.assert_refused(f"'{path}' is a folder", "plan", "-t", "pcie", "--draw", str(path))

    def test_a_picture_that_cannot_be_written(self):
        path = self.folder / "a.png"
        path.symlink_to(self.folder / "missing" / "a.png")
        status, _, errors = run_tfcdo("plan", "-t", "pcie", "-b", "1MB", "--draw", str(path))
        self.assertEqual((status, errors), (1, f"tfcdo: {path}: {_NO_SUCH_FILE}\n"))


class ProcessTest(absltest.TestCase):
    def test_does_not_wait_for_tensorflow(self):
        script = (
            "import sys\n"
            "from tfcdo.cli.main import main\n"
            "try: main()\n"
            "finally: print('tensorflow' in sys.modules, file=sys.stderr)"
        )
        arguments = ["plan", "-t", "pcie:2", "-b", "1MB"]
        result = warm_python.run_cold("-c", script, *arguments)
        self.assertEqual((result.returncode, result.stderr), (0, "False\n"))
        self.assertIn("All-reduce of 1.00 MB", result.stdout)


class SavedTest(CommandTestCase):
    def rows(self, *arguments: str) -> dict[str, list[str]]:
        """Returns the cells of the table by the algorithm."""
        return rows_of_table(self.output_of("plan", *arguments))

    @parameterized.parameters(("packed_trees", None), ("hierarchical_copy", 3), ("auto", 1))
    def test_a_plan_that_was_saved_is_read(self, algorithm: str, num_packs: int | None):
        path = self.folder / "plan.json"
        arguments = ["-t", "dgx1", "-b", "10MB", "-a", algorithm, "--save", str(path)]
        arguments += ["--num-packs", str(num_packs)] if num_packs else []
        self.assertIn(f" in {path}\n", self.output_of("plan", *arguments))
        found = Evaluation.read(path)
        self.assertEqual(found.topology, preset("dgx1"))
        self.assertEqual(found.algorithm, algorithm)
        wanted = algorithms.make_plan(found.resolved, preset("dgx1"), 10**7, num_packs)
        for one, other in zip(found.plan.packs, wanted.packs, strict=True):
            self.assertEqual((one.tree, one.after), (other.tree, other.after))
            [part], [wanted_part] = one.slices, other.slices
            # Elements of 4 bytes are not cut.
            self.assertEqual(part.start % 4, 0)
            self.assertLess(abs(part.start - wanted_part.start), 4)
        self.assertGreaterEqual(found.seconds, found.bound)
        self.assertAlmostEqual(
            found.ordered_seconds, simulator.simulate(found.plan, preset("dgx1")).seconds
        )
        origin = "packed trees for dgx1" if found.resolved == "packed_trees" else "own trees"
        self.assertIn(origin, found.origin)

    def test_windows_are_saved(self):
        machine = preset("pcie", 2)
        packs = plan_of_bytes(2, [(1, star(2), i - 2 if i > 1 else None) for i in range(5)])
        plan = Evaluation(machine, "auto", "packed_trees", packs, 2.0, 1.5, 1.0)
        again = Evaluation.from_json(plan.to_json())
        self.assertEqual(again.plan.packs, packs.packs)
        self.assertEqual(dataclasses.replace(again, plan=packs), plan)
        # Earlier versions wrote no windows.
        text = re.sub(', "after": [^}]*', "", plan.to_json())
        self.assertEqual({pack.after for pack in Evaluation.from_json(text).plan.packs}, {None})

    def test_tensorflows_default_of_one_pack_can_be_shown(self):
        rows = self.rows("-t", "dgx1", "--num-packs", "1")
        self.assertEqual({cells[0] for cells in rows.values()}, {"1"})
        # 100 MB up and down three links of 10, 25 and 50 GB/s, and what shares the first.
        self.assertEqual(rows["hierarchical_copy"][4], "12.04 ms")

    def test_the_robust_time_has_the_ordered_one_beside_it(self):
        cells = self.rows("-t", "nvswitch:4", "-b", "25MB")["ring"]
        schedule = algorithms.make_plan("ring", preset("nvswitch", 4), 25 * 10**6)
        robust = simulator.robust_seconds(schedule, preset("nvswitch", 4))
        ordered = simulator.simulate(schedule, preset("nvswitch", 4)).seconds
        self.assertEqual(cells[3:5], [format_seconds(robust), format_seconds(ordered)])

    def test_a_measurement_in_a_file(self):
        path = self.folder / "machine.json"
        found = measurement.Measured(preset("pcie"), "2026-01-02", ((1000, 1e-9),))
        measurement.save(found, path)
        output = self.output_of("plan", "-t", str(path), "-b", "1MB")
        self.assertIn("4 devices of pcie", output)


if __name__ == "__main__":
    absltest.main()
