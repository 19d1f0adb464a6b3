"""Writes docs/defects.md from the table of known defects; tests/check/test_check_defects.py says whether it is current.

python ci/defects-page.py
"""

from pathlib import Path

from pybnorm.defects import page

target = Path(__file__).parents[1] / "docs" / "defects.md"
target.write_text(page())
print(target)
