"""The plan cache: found again, whole, bounded, and never a reason to fail."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import tempfile
from unittest import mock

import plan_testing
from absl.testing import absltest
from absl.testing import parameterized

from tfcdo import log
from tfcdo.plan import algorithms
from tfcdo.plan import plan_cache
from tfcdo.plan import search
from tfcdo.plan.copy_tree import star
from tfcdo.plan.schedule import Schedule
from tfcdo.plan.tree_packing import TreePacking
from tfcdo.topology.presets import preset

MB = 10**6
# A machine that no plan comes with the package for.
UNKNOWN = preset("pcie", 3)


class PlanCacheTest(plan_testing.PlanTestCase):
    def setUp(self) -> None:
        super().setUp()
        log.warn_once.cache_clear()
        # The trees of a machine are kept in the same way: here is one file for each plan alone.
        no_trees = mock.patch.object(search, "_trees", return_value=None)
        self.enter_context(no_trees)

    def plan(self, num_packs: int | None = 2, num_bytes: int = 30 * MB) -> Schedule:
        """Plans as a new process does."""
        plan_testing.forget()
        return algorithms.make_schedule("packed_trees", UNKNOWN, num_bytes, num_packs)

    def test_a_file_gives_the_schedule_that_the_search_gave(self):
        with plan_testing.counted_work() as work:
            first = self.plan()
            self.assertEqual(search.origin(UNKNOWN, 30 * MB, 2), "searched for this machine")
            self.assertEqual(self.plan(), first)
        self.assertEqual(work["searches"], 1)
        kept = "kept since an earlier search for this machine"
        self.assertEqual(search.origin(UNKNOWN, 30 * MB, 2), kept)

    def test_lists_what_it_keeps(self):
        self.assertEmpty(plan_cache.kept())
        schedule = self.plan()
        pathlib.Path(self.cache, "plan-x.json").write_bytes(b"{")
        ((file, plan),) = plan_cache.kept()
        self.assertTrue(file.is_file())
        self.assertEqual((plan.topology, plan.found_for.split("-")[1]), ("pcie", "2"))
        self.assertEqual(plan.parents, tuple(pack.tree.parents for pack in schedule.packs))

    @parameterized.parameters(
        b"", b"{", b"[]", b"null", b'{"weights": [1]}', b"\xff\xfe", b'{"weights": "\xff\xfe"}',
        b'{"weights": [1], "parents": [[null, 0]]}',  # Of two devices.
        b'{"weights": [1], "parents": [[1, 0, 0]]}',  # No tree.
        b'{"weights": [-1], "parents": [[null, 0, 0]]}',
        b'{"weights": [], "parents": []}',
        b'{"weights": [1e308, 1e308], "parents": [[null, 0, 0], [null, 0, 0]]}',
        b'{"weights": ["x"], "parents": [[null, 0, 0]]}',
        b'{"weights": [1], "parents": [[null, 0, "x"]]}',
        b'{"weights": [1], "parents": 5}',
        b'{"weights": [1' + 400 * b"0" + b'], "parents": [[null, 0, 0]]}',
        b"[" * 100_000, b'{"other": ' + b"[" * 100_000,
    )  # fmt: skip
    def test_a_damaged_file_is_ignored_with_one_line(self, content):
        expected = self.plan()
        (file,) = pathlib.Path(self.cache).iterdir()
        file.write_bytes(content)
        with self.assertLogs(level=logging.WARNING) as logged:
            self.assertEqual(self.plan(), expected)
        self.assertLen(logged.output, 1)
        self.assertIn(str(file), logged.output[0])
        self.assertNotIn("\n", logged.output[0])
        self.assertEqual(self.plan(), expected)  # The file is whole again.
        self.assertEqual(len(json.loads(file.read_text())["weights"]), len(expected.packs))

    def test_a_file_of_another_number_of_packs_is_ignored(self):
        expected = self.plan(num_packs=5)
        (file,) = pathlib.Path(self.cache).iterdir()
        content = json.loads(file.read_text())
        file.write_text(json.dumps({key: content[key][:1] for key in content}))
        self.assertEqual(self.plan(num_packs=5), expected)
        self.assertEqual(json.loads(file.read_text()), content)

    def test_the_files_used_longest_ago_are_deleted(self):
        packing = TreePacking((star(3),), (1.0,))
        folder = pathlib.Path(self.cache)
        (folder / "something else.json").write_text("kept")
        (folder / "plan-1-of-an-earlier-version.json").write_text("deleted")
        os.utime(folder / "plan-1-of-an-earlier-version.json", (1, 1))
        with mock.patch.object(plan_cache, "_MAX_FILES", 3):
            for age, key in enumerate("abc"):
                plan_cache.save(UNKNOWN, key, packing)
                (file,) = folder.glob(f"*-{key}.json")
                os.utime(file, (1000 + age, 1000 + age))
            self.assertIsNotNone(plan_cache.load(UNKNOWN, "a"))  # Which was the oldest.
            plan_cache.save(UNKNOWN, "d", packing)
        left = {file.stem[-1] for file in folder.glob("plan-*.json")}
        self.assertEqual(left, {"a", "c", "d"})
        self.assertTrue((folder / "something else.json").exists())

    def test_a_folder_that_cannot_be_written_is_no_error(self):
        with tempfile.NamedTemporaryFile() as file:
            nowhere = f"{file.name}/below"
            with (
                mock.patch.dict(os.environ, {"TFCDO_CACHE_DIR": nowhere}),
                self.assertLogs(level=logging.WARNING) as logged,
            ):
                self.plan()
        self.assertLen(logged.output, 1)
        self.assertRegex(logged.output[0], "cannot be used: Not a dir.*TFCDO_CACHE_DIR")

    def test_a_file_that_cannot_be_read_is_reported(self):
        expected = self.plan()

        def denied(path, *_, **__):
            raise PermissionError(13, "Permission denied", str(path))

        with (
            mock.patch.object(pathlib.Path, "read_bytes", denied),
            self.assertLogs(level=logging.WARNING) as logged,
        ):
            self.assertEqual(self.plan(), expected)
        self.assertLen(logged.output, 1)
        self.assertIn(f"because {self.cache} cannot be used: Permission denied;", logged.output[0])

    def test_a_folder_that_may_only_be_read_is_used(self):
        expected = self.plan()
        with (
            mock.patch.object(os, "utime", side_effect=PermissionError(1, "Not permitted")),
            plan_testing.counted_work() as work,
        ):
            self.assertEqual(self.plan(), expected)
        self.assertEqual(work["searches"], 0)

    def test_what_can_be_neither_read_nor_written_is_reported_once(self):
        too_long = f"{self.cache}/{300 * 'x'}"
        with (
            mock.patch.dict(os.environ, {"TFCDO_CACHE_DIR": too_long}),
            self.assertLogs(level=logging.WARNING) as logged,
        ):
            self.plan()
            self.plan(num_bytes=300 * MB)
        self.assertLen(logged.output, 1)
        self.assertIn("cannot be used: File name too long", logged.output[0])

    def test_without_a_home_nothing_is_kept(self):
        nowhere = {"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
        with (
            mock.patch.dict(os.environ, nowhere),
            # A user that is a mere number, as in a container.
            mock.patch("pwd.getpwuid", side_effect=KeyError("uid not found")),
            self.assertLogs(level=logging.WARNING) as logged,
        ):
            os.environ.pop("HOME", None)
            self.plan()
        self.assertLen(logged.output, 1)
        self.assertRegex(logged.output[0], "there is no home directory; TFCDO_CACHE_DIR")

    def test_files_appear_whole(self):
        def interrupted(*_):
            raise OSError("no space left")

        with (
            mock.patch.object(pathlib.Path, "replace", interrupted),
            self.assertLogs(level=logging.WARNING),
        ):
            self.plan()
        self.assertEmpty(list(pathlib.Path(self.cache).iterdir()))

    @parameterized.parameters(
        ({"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": "{}"}, "tfcdo"),
        ({"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "{}"}, ".cache/tfcdo"),
        ({"TFCDO_CACHE_DIR": "{}", "XDG_CACHE_HOME": "/elsewhere"}, "."),
        ({"TFCDO_CACHE_DIR": "", "XDG_CACHE_HOME": "relative", "HOME": "{}"}, ".cache/tfcdo"),
        ({"TFCDO_CACHE_DIR": "~/mine", "HOME": "{}"}, "mine"),
    )
    def test_where(self, variables, folder):
        with mock.patch.dict(os.environ, {k: v.format(self.cache) for k, v in variables.items()}):
            self.plan()
        self.assertLen(list((pathlib.Path(self.cache) / folder).glob("plan-*.json")), 1)


if __name__ == "__main__":
    absltest.main()
