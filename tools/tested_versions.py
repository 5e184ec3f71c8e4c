"""Keeps the record of the versions on which the fast tests were run: docs/versions.md.

    python tools/tested_versions.py JUNIT_XML    # in the environment that was tested
    python tools/tested_versions.py              # just the page, from the record

`make test-versions` does so for each combination of noxfile.py.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pages

from tfcdo import version

# In the package, because an error about an unknown TensorFlow names the known ones.
RECORD = pages.ROOT / "tfcdo" / "tested_versions.json"
Entry = dict[str, str | int]


def entry_of(report: pathlib.Path) -> Entry:
    """Reads what pytest reports, and the versions of the environment that this runs in."""
    (suite,) = ElementTree.parse(report).iter("testsuite")
    counts = ("tests", "skipped", "failures", "errors")
    tests, skipped, failures, errors = (int(suite.attrib[name]) for name in counts)
    failed = failures + errors
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")},
        "passed": tests - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def table(record: list[Entry]) -> Iterator[str]:
    """Makes the lines of the page's table, the newest versions first."""
    columns = ("tensorflow", "python", "keras", "numpy", "passed", "failed", "skipped", "date")
    rows = ([entry[name] for name in columns] for entry in record[::-1])
    return pages.table("TensorFlow | Python | Keras | numpy | passed | failed | skipped | on", rows)


def read_record() -> list[Entry]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def _combination(entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Sorts by numbers, and takes the patches of a Python and the newer Keras for one version."""
    tensorflow, python = (
        tuple(int(number) for number in str(entry[name]).split(".") if number.isdigit())
        for name in ("tensorflow", "python")
    )
    return tensorflow, python[:2], not version.adds_metrics_twice(str(entry["keras"]))


if __name__ == "__main__":
    failed = False
    for report in sys.argv[1:]:
        entry = entry_of(pathlib.Path(report))
        # It replaces an older one of the same combination.
        record = {_combination(each): each for each in [*read_record(), entry]}
        kept = [record[combination] for combination in sorted(record)]
        RECORD.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        failed |= bool(entry["failed"])
    pages.replace("docs/versions.md", "tested_versions.py", table(read_record()))
    sys.exit(failed)  # 1 if a test failed.
