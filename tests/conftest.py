"""What pytest says at the end of a run."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts the NCCL tests: on a machine without a compiler they skip, which should be seen."""
    counts = []
    for outcome in ("passed", "failed", "error", "skipped"):
        reports = terminalreporter.stats.get(outcome, [])
        ours = [
            report
            for report in reports
            # tf.test.TestCase has a test_session that is no test and always skips.
            if "nccl" in report.nodeid.partition("::")[0] and "test_session" not in report.nodeid
        ]
        if ours:
            counts.append(f"{len(ours)} {outcome}")
    if counts:
        terminalreporter.write_line(f"NCCL tests: {', '.join(counts)}")
