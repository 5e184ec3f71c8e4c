from __future__ import annotations

from typing import Any

import performance_hosts
from absl.testing import absltest


def _result(kind: str, seconds: float, bytes_sent: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "seconds": seconds,
        "bytes_sent": bytes_sent,
        "gradient_bytes": 30_000_000,
    }


_RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "machine": {"cores": 2},
    "load": 7.4,
    "least_sending_seconds": 0.5,
    "results": [
        _result("tfcdo", 0.8, 60e6),
        _result("tfcdo bfloat16", 0.45, 30e6),
        _result("tf", 1.0, 90e6),
        _result("computing alone", 0.2, 0.0),
    ],
}
_CASE = performance_hosts.Case(2, 2, "1gbit", max_bytes=0.67, max_seconds=0.70, max_bytes_cast=0.3)


class SectionTest(absltest.TestCase):
    def test_ratios_and_verdicts(self):
        section = performance_hosts.section({_CASE: _RUN})
        self.assertIn(
            "| 2 x 2, 1gbit | 1000 | 800 | 0.80 | 0.70 | **missed** | 0.50 | 200 | 90.0 | 60.0 "
            "| 0.667 | 0.67 | met |",
            section,
        )
        self.assertIn(
            "| 2 x 2, 1gbit, bfloat16 | 1000 | 450 | 0.45 |  |  | 0.25 | 200 | 90.0 | 30.0 "
            "| 0.333 | 0.30 | **missed** |",
            section,
        )
        self.assertIn("30 MB of gradients", section)
        self.assertIn("load was 7 to 7", section)

    def test_no_targets(self):
        case = performance_hosts.Case(2, 1, None)
        section = performance_hosts.section({case: {**_RUN, "load": 1.5}})
        self.assertIn("load was 2 to 2", section)
        self.assertIn("| 2 x 1, no limit | 1000 | 800 | 0.80 |  |  | 0.50 |", section)


if __name__ == "__main__":
    absltest.main()
