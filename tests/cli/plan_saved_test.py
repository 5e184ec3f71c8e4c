"""What `tfcdo plan` saves, lists and shows of numbers of packs and of ordered times."""

from __future__ import annotations

import json

from absl.testing import absltest, parameterized
from cli_testing import CommandTestCase, rows_of_table

from tfcdo.plan import algorithms, simulator
from tfcdo.plan.saved_plan import SavedPlan
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
        self.assertEqual(
            self.output_of("plan", *arguments, "--json"), path.read_text(encoding="utf-8")
        )
        found = SavedPlan.read(path)
        self.assertEqual(found.topology, preset("dgx1"))
        self.assertEqual(found.algorithm, algorithm)
        self.assertEqual(
            found.schedule,
            algorithms.make_schedule(found.resolved, preset("dgx1"), 10**7, num_packs),
        )
        self.assertAlmostEqual(
            found.ordered_seconds, simulator.simulate(found.schedule, preset("dgx1")).seconds
        )
        bundled = "bundled with tfcdo" if found.resolved == "packed_trees" else "own trees"
        self.assertIn(bundled, found.origin)

    def test_tensorflows_default_of_one_pack_can_be_shown(self):
        rows = self.rows("-t", "dgx1", "--num-packs", "1")
        self.assertEqual({cells[0] for cells in rows.values()}, {"1"})
        # 100 MB up and down three links of 10, 25 and 50 GB/s, and what shares the first.
        self.assertEqual(rows["hierarchical_copy"][5], "12.04 ms")

    def test_the_robust_time_has_the_ordered_one_beside_it(self):
        cells = self.rows("-t", "nvswitch:4", "-b", "25MB")["ring"]
        schedule = algorithms.make_schedule("ring", preset("nvswitch", 4), 25 * 10**6)
        robust = simulator.robust_seconds(schedule, preset("nvswitch", 4))
        ordered = simulator.simulate(schedule, preset("nvswitch", 4)).seconds
        self.assertEqual(cells[4:6], [format_seconds(robust), format_seconds(ordered)])

    def test_lists_the_plans_that_need_no_search(self):
        listed = self.output_of("plan", "--list")
        self.assertRegex(listed, r"dgx1 +│ 8 +│ 100 MB +│ [0-9]+ +│ 1\.[0-9]+")
        self.output_of("plan", "-t", "pcie:3", "-b", "1MB", "-a", "packed_trees", "--json")
        self.assertEqual(listed, self.output_of("plan", "--list"))
        self.assertEmpty(list(self.cache.iterdir()))  # Nothing that another process might read.

    def test_what_is_left_after_a_backward_pass(self):
        arguments = ("-t", "pcie", "--model", "mobilenet", "--backward", "20ms")
        rows = self.rows(*arguments)
        for name in ("ring", "hierarchical_copy"):
            self.assertIn(name, rows)
        found = json.loads(self.output_of("plan", *arguments, "--json"))
        last = max(pack["done"] for pack in found["packs"])
        self.assertAlmostEqual(found["exposed"], last - 20e-3)
        ready = [pack["ready"] for pack in found["packs"]]
        self.assertEqual(ready, sorted(ready))
        self.assertAlmostEqual(ready[-1], 20e-3)
        self.assertEqual(found["packs"][-1]["stop"], found["size"])
        self.assertIn(f"{len(ready) - 1}", rows)  # The packs are listed by their numbers.

    def test_a_model_instead_of_bytes(self):
        output = self.output_of("plan", "-t", "pcie", "--model", "resnet50")
        self.assertIn("All-reduce of 102 MB on each of 4 devices", output)


if __name__ == "__main__":
    absltest.main()
