"""Bytes and seconds with their units."""

from __future__ import annotations

from absl.testing import absltest, parameterized

from tfcdo import log


class UnitsTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (10**8, "100 MB"), (25 * 10**8, "2.50 GB"),
        (4 * 10**12, "4000 GB"), (999_499, "999 kB"), (999_999, "1.00 MB"), (99_960_000, "100 MB"),
    )  # fmt: skip
    def test_bytes(self, size: int, text: str):
        self.assertEqual(log.format_bytes(size), text)

    @parameterized.parameters(
        (0.0, "0 s"), (2.0, "2.000 s"), (0.01204, "12.04 ms"), (4e-7, "0.4000 µs"),
        (9.99999e-4, "1.000 ms"), (0.9999, "999.9 ms"), (12345.6, "12350 s"),
    )  # fmt: skip
    def test_seconds(self, seconds: float, text: str):
        self.assertEqual(log.format_seconds(seconds), text)


if __name__ == "__main__":
    absltest.main()
