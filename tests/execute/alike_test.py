"""Groups of what is alike: each position once, and results in the order of what was grouped."""

from __future__ import annotations

import hypothesis
from absl.testing import absltest
from hypothesis import strategies as st

from tfcdo.execute import alike


class AlikeTest(absltest.TestCase):
    @hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(st.integers(0, 4)))
    def test_groups_of_equal_keys(self, keys):
        groups = alike.group(keys)
        self.assertEqual(sorted(sum(groups, ())), list(range(len(keys))))
        found = [{keys[position] for position in positions} for positions in groups]
        self.assertEqual([{key} for key in dict.fromkeys(keys)], found)
        for positions in groups:
            self.assertEqual(sorted(positions), list(positions))

    @hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(st.tuples(st.integers(0, 4), st.integers())))
    def test_results_are_in_order(self, items):
        groups = alike.group(key for key, _ in items)
        results = [alike.members(items, positions) for positions in groups]
        self.assertEqual(items, alike.in_order(groups, results))

    def test_a_result_for_each_position(self):
        for results in ([["a"]], [["a", "b", "c"]], [["a", "b"], []]):
            with self.assertRaises(ValueError):
                alike.in_order([(0, 1)], results)


if __name__ == "__main__":
    absltest.main()
