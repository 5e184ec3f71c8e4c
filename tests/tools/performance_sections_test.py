from __future__ import annotations

import pathlib
import tempfile

import performance_sections
from absl.testing import absltest

_SECTION = "## A\n\nnew\n"


class SectionTest(absltest.TestCase):
    def test_is_put_at_the_end_of_a_page_without_it(self):
        page = performance_sections.replace_section("# Page\n\n## B\n\nb\n", _SECTION)
        self.assertEqual(page, f"# Page\n\n## B\n\nb\n\n{_SECTION}")

    def test_takes_the_place_of_the_earlier_one(self):
        page = "# Page\n\n## A\n\nold\n\n## B\n\nb\n"
        replaced = performance_sections.replace_section(page, _SECTION)
        self.assertEqual(replaced, f"# Page\n\n{_SECTION}\n## B\n\nb\n")
        self.assertEqual(performance_sections.replace_section(replaced, _SECTION), replaced)

    def test_another_heading_that_begins_alike_is_another_section(self):
        page = "# Page\n\n## A and B\n\nkept\n"
        replaced = performance_sections.replace_section(page, _SECTION)
        self.assertEqual(replaced, f"{page}\n{_SECTION}")

    def test_is_written_into_a_page_that_is_not_there(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "page.md")
            for _ in range(2):
                performance_sections.write_section(path, _SECTION)
            self.assertEqual(path.read_text(encoding="utf-8"), _SECTION)


if __name__ == "__main__":
    absltest.main()
