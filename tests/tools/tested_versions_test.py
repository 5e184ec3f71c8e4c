"""docs/versions.md and its record."""

from __future__ import annotations

import importlib.metadata
import pathlib
import platform
import tempfile

import tested_versions
from absl.testing import absltest

_JUNIT = """\
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1.0">
<testcase classname="a" name="b" time="0.1" /></testsuite></testsuites>
"""


class RecordTest(absltest.TestCase):
    def test_an_entry_is_what_pytest_reports_in_this_environment(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        report = pathlib.Path(folder, "junit.xml")
        report.write_text(_JUNIT, encoding="utf-8")
        entry = tested_versions.entry_of(report)
        self.assertEqual((entry["passed"], entry["failed"], entry["skipped"]), (4, 3, 3))
        self.assertEqual(entry["python"], platform.python_version())
        self.assertEqual(entry["tensorflow"], importlib.metadata.version("tensorflow"))

    def test_the_page_is_made_from_the_record(self):
        record = tested_versions.read_record()
        self.assertNotEmpty(record)
        self.assertEqual(tested_versions.PAGE.read_text("utf-8"), tested_versions.page(record))
        self.assertContainsSubset({"2.16.2"}, {entry["tensorflow"] for entry in record})


if __name__ == "__main__":
    absltest.main()
