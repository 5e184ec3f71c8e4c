"""Keeps the record of the versions on which the fast tests were run, and makes the page from it.

    python tools/tested_versions.py JUNIT_XML    # in the environment that was tested
    python tools/tested_versions.py              # just docs/versions.md from the record

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

import pages

from tfcdo import version

# In the package, because an error about an unknown TensorFlow names the known ones.
RECORD = pages.ROOT / "tfcdo" / "tested_versions.json"
PAGE = pages.ROOT / "docs" / "versions.md"
_PACKAGES = ("tensorflow", "keras", "numpy")
Entry = dict[str, str | int]

_HEADING = """\
# Versions

Made by `make test-versions`: each line is a run of the fast tests (`tests/fast_tests.txt`, one of
each kind) in an environment of its own, on Linux. A combination that is not in the table was not
run. A run shows tfcdo as it was on its date, without features that are newer.

tfcdo is developed on the newest TensorFlow and Python 3.11, where each submission runs all tests.

| | Keras 3 | tf_keras (Keras 2) |
|---|---|---|
| strategies and cross-device ops, in `fit` and in own loops | yes | yes |
| `tfcdo.keras` | yes | raises `TypeError`: needs Keras 3 |

tf_keras 2.18.0 and 2.21.0 were tried by hand. Keras 3.7 to 3.9 has incorrect metrics under
TensorFlow's strategies, and correct ones under tfcdo's.

Keras below 3.15 has two tests fewer: it has no `MultiOptimizer`.

"""


def entry_of(report: pathlib.Path) -> Entry:
    """Reads what pytest reports, and the versions of the environment that this runs in."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, skipped, failures, errors = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    )
    failed = failures + errors
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "passed": tests - skipped - failed,
        "failed": failed,
        "skipped": skipped,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def with_entry(record: list[Entry], entry: Entry) -> list[Entry]:
    """Returns the record with an entry, instead of an older one of the same combination."""
    others = [old for old in record if _combination(old) != _combination(entry)]
    return sorted([*others, entry], key=_combination)


def page(record: list[Entry]) -> str:
    """Writes docs/versions.md, the newest versions first."""
    columns = ("tensorflow", "python", "keras", "numpy", "passed", "failed", "skipped", "date")
    rows = ([entry[name] for name in columns] for entry in record[::-1])
    heading = "TensorFlow | Python | Keras | numpy | passed | failed | skipped | on"
    return _HEADING + "\n".join([*pages.table(heading, rows), ""])


def read_record() -> list[Entry]:
    """Reads the record."""
    entries: list[Entry] = json.loads(RECORD.read_text(encoding="utf-8"))
    return entries


def _combination(entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Sorts by numbers, and takes the patches of a Python and the newer Keras for one version."""
    tensorflow, python = (
        tuple(int(number) for number in str(entry[name]).split(".") if number.isdigit())
        for name in ("tensorflow", "python")
    )
    return tensorflow, python[:2], not version.adds_metrics_twice(str(entry["keras"]))


def main() -> None:
    """The command line; the exit status is 1 if a test failed."""
    failed = False
    for report in sys.argv[1:]:
        entry = entry_of(pathlib.Path(report))
        record = with_entry(read_record(), entry)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        failed |= bool(entry["failed"])
    PAGE.write_text(page(read_record()), encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
