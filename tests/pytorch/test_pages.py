"""Blocks of the documentation's pages that need PyTorch run as they are written."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["pytorch", "exporting"])
def test_the_blocks_of_a_page_run_one_after_another(page):
    if not DOCS.is_dir():
        pytest.skip("the documentation is not beside the tests")
    blocks = re.findall(r"```py\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert type(names["model"][-1]) is torch.nn.ReLU
