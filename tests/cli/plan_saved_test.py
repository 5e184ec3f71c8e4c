"""What `tfcdo plan` saves and shows of numbers of packs and of ordered times."""

from __future__ import annotations

import re

from absl.testing import absltest, parameterized
from cli_testing import CommandTestCase, rows_of_table

from tfcdo.plan import algorithms, simulator
from tfcdo.plan.copy_tree import star
from tfcdo.plan.evaluation import Evaluation
from tfcdo.plan.schedule import Pack, Schedule
from tfcdo.topology.presets import preset
from tfcdo.units import format_seconds


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
        self.assertEqual(
            found.schedule,
            algorithms.make_schedule(found.resolved, preset("dgx1"), 10**7, num_packs),
        )
        self.assertGreaterEqual(found.seconds, found.bound)
        self.assertAlmostEqual(
            found.ordered_seconds, simulator.simulate(found.schedule, preset("dgx1")).seconds
        )
        origin = "packed trees for dgx1" if found.resolved == "packed_trees" else "own trees"
        self.assertIn(origin, found.origin)

    def test_windows_are_saved(self):
        machine = preset("pcie", 2)
        packs = tuple(Pack(i, i + 1, star(2), i - 2 if i > 1 else None) for i in range(5))
        plan = Evaluation(machine, "auto", "packed_trees", Schedule(2, 5, packs), 2.0, 1.5, 1.0)
        self.assertEqual(Evaluation.from_json(plan.to_json()), plan)
        # Earlier versions wrote no windows.
        text = re.sub(', "after": [^}]*', "", plan.to_json())
        self.assertEqual({pack.after for pack in Evaluation.from_json(text).schedule.packs}, {None})

    def test_tensorflows_default_of_one_pack_can_be_shown(self):
        rows = self.rows("-t", "dgx1", "--num-packs", "1")
        self.assertEqual({cells[0] for cells in rows.values()}, {"1"})
        # 100 MB up and down three links of 10, 25 and 50 GB/s, and what shares the first.
        self.assertEqual(rows["hierarchical_copy"][4], "12.04 ms")

    def test_the_robust_time_has_the_ordered_one_beside_it(self):
        cells = self.rows("-t", "nvswitch:4", "-b", "25MB")["ring"]
        schedule = algorithms.make_schedule("ring", preset("nvswitch", 4), 25 * 10**6)
        robust = simulator.robust_seconds(schedule, preset("nvswitch", 4))
        ordered = simulator.simulate(schedule, preset("nvswitch", 4)).seconds
        self.assertEqual(cells[3:5], [format_seconds(robust), format_seconds(ordered)])


if __name__ == "__main__":
    absltest.main()
