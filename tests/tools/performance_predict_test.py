from __future__ import annotations

from typing import Any

import performance_predict
from absl.testing import absltest


def _run(median_ratio: float, loss: float) -> dict[str, Any]:
    rows = [
        {"size": 10**6, "names": ["ring"], "num_packs": 4}
        | {"simulated": 2e-3, "measured": 1e-3, "spread": 1e-4, "ratio": 2.0},
        {"size": 10**6, "names": ["shuffle", "auto"], "num_packs": 4}
        | {"simulated": 5e-4, "measured": 1e-3, "spread": 1e-4, "ratio": 0.5},
    ]
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"processor": "Fast", "cores": 2},
        "devices": "4 virtual CPU devices",
        "median_ratio": median_ratio,
        "sizes": [{"loss": loss, "agreement": 1.0, "predictions": rows}],
    }


class SectionTest(absltest.TestCase):
    def test_rows_and_verdicts(self):
        section = performance_predict.section([_run(1.25, 0.0), _run(1.25, 0.11), _run(1.41, 0.0)])
        self.assertIn("| 1.0 | ring | 4 | 2.00 | 1.00 | 0.10 | 2.00 | 100% |", section)
        self.assertIn("| 1.0 | shuffle, **auto** | 4 | 0.50 | 1.00 | 0.10 | 0.50 |  |", section)
        self.assertIn("measured 1.25, the most that `auto` loses 0%: met.", section)
        self.assertIn("measured 1.25, the most that `auto` loses 11%: **missed**.", section)
        self.assertIn("measured 1.41, the most that `auto` loses 0%: **missed**.", section)


if __name__ == "__main__":
    absltest.main()
