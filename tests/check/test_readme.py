"""What the README and the documentation's pages show runs as it is written."""

import re
from pathlib import Path

import pytest

import pybnorm

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"
needs_docs = pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation is not beside the tests")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


PAGES = [page for page in (README, *sorted(DOCS.glob("*.md"))) if page.is_file() and blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_blocks_of_a_page_run_one_after_another(page, onednn, tmp_path, monkeypatch):
    names = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)
    if "handle" in names:
        names["handle"].close()
    if page.stem not in ("check", "conventions"):  # whose blocks show verdicts
        assert names["y"].std() == pytest.approx(1, rel=1e-2)


@needs_docs
def test_pages_have_blocks():
    assert {p.stem for p in PAGES} >= {"README", "call", "plans"}
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 120] == []


@needs_docs
def test_defects_are_counted():
    entries = (DOCS / "defects.md").read_text(encoding="utf-8").split("\n### ")[1:]
    effects = re.compile(r"^\* Seen: (?!no).*^\* Effect: (?:wrong|the call fails)", re.MULTILINE | re.DOTALL)
    count = sum(bool(effects.search(entry)) for entry in entries)
    assert f"{count} ways in which they are wrong or fail" in README.read_text(encoding="utf-8")


def sentences(text):
    """The sentences of a page's paragraphs, list items and cells, with one word for each name in backticks."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=[-*] |#|\|)", text):
        for cell in block.strip("| \n").split(" | ") if block.lstrip().startswith("|") else [block]:
            plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "name", cell))
            yield from re.split(r"(?<=[.!?])[)*]*\s+", " ".join(plain.split()))


@needs_docs
def test_sentences_have_at_most_25_words():
    """Of every page but that of the defects, which is made of their table."""
    pages = [page for page in DOCS.glob("*.md") if page.stem not in ("defects", "changelog")]
    found = [(page.name, s) for page in pages for s in sentences(page.read_text(encoding="utf-8"))]
    assert len(found) > 500
    assert [(page, s) for page, s in found if len(re.findall(r"\w[\w'/.%-]*", s)) > 25] == []


@needs_docs
def test_links_lead_to_files():
    """Of the README and of every page to another file of the tree."""
    pages = [README, README.with_name("CONTRIBUTING.md"), *DOCS.glob("*.md")]
    links = [(p, target) for p in pages for target in re.findall(r"\]\(([^)#]+)", p.read_text(encoding="utf-8"))]
    assert len(links) > 20
    assert [str(p.name) + ": " + t for p, t in links if ":" not in t and not (p.parent / t).exists()] == []


@needs_docs
def test_the_environment_s_variables_are_in_its_table():
    told = (DOCS / "environment.md").read_text(encoding="utf-8")
    package = Path(pybnorm.__file__).parent
    sources = [*package.rglob("*.py"), *package.rglob("*.pxi"), *package.glob("_core.pyx")]
    read = {n for s in sources for n in re.findall(r'"(PYBNORM_[A-Z_]*[A-Z])"', s.read_text(encoding="utf-8"))}
    assert "PYBNORM_CLAIMS" in read
    assert sorted(name for name in read if f"`{name}`" not in told and f"`{name}=" not in told) == []
