"""The pages of a run and of a comparison in chromium: links, sorting, lazy rows, and nothing on the console."""

import dataclasses
import os
import re

import browser
import pytest
from made_runs import made_result, make_run, nudged

from pybnorm.check.compare import comparison as compare
from pybnorm.check.compare import pages
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import ratio_text
from pybnorm.check.report import html
from pybnorm.check.report.plots import COLOURS
from pybnorm.check.run.environment import machine
from pybnorm.check.run.runner import BackendInfo

INFOS = [BackendInfo("cudnn", "cuDNN", (9, 2, 0), "/lib/libcudnn.so.9", "made", device="NVIDIA <made>")]
CASES = 250


@pytest.fixture(scope="module")
def opened_browser():
    if absent := browser.missing():
        if "chromium" in os.environ.get("PYBNORM_REQUIRE_PACKAGES", ""):
            pytest.fail(f"{absent} not found, and PYBNORM_REQUIRE_PACKAGES names chromium")
        pytest.skip(f"{' and '.join(absent)} not on this machine: no page was seen in a browser")
    with browser.browser() as found:
        yield found


@pytest.fixture
def chromium(opened_browser):
    """A browser, which has nothing to say of the pages."""
    yield opened_browser
    assert opened_browser.log() == []


def results():
    found = []
    for i in range(CASES):
        line = f"train,spatial,{('f32', 'bf16')[i % 2]},{('nchw', 'nhwc')[i // 2 % 2]},{2 + i}x3x4x5,fill=randn"
        status = Status.FAIL if i % 4 == 3 else Status.UNSUPPORTED if i % 4 == 0 and i > 200 else Status.PASS
        result, ratio = made_result(status, line), (i + 1) / 100
        result.verdicts = [
            dataclasses.replace(v, ratio=ratio, ratios={v.tier: ratio}, output=name)
            for v in result.verdicts
            for name in html.TITLES
        ]
        for verdict in result.verdicts[:1]:
            verdict.picture = ["..9", "x.1"]
        found.append(result)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, plots):
    """The pages of a run and of a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    html.write(folder / "run.html", machine() | {"folder": "/" + "long" * 30}, INFOS, results())
    lines = ["train,spatial,f32,nchw,4x3x5x5,fill=randn", "backward,spatial,f32,nchw,4x3x5x5,fill=randn"]
    make_run(folder / "a", "cudnn", lines)
    make_run(folder / "b", "cudnn", lines, (2, 0), lambda *a: nudged(a[2], 10**6))
    pages.write_comparison(folder / "comparison.html", compare.compare(compare.read([folder / "a", folder / "b"])))
    return folder


@pytest.fixture
def page(folder):
    return folder / "run.html"


SHOWN = "[...document.querySelectorAll('#cases tbody tr[id^=case-]')].map(r => r.id)"
SORTED = "[...document.querySelectorAll('#cases thead th button')].find(b => b.textContent === '{}').click(), " + SHOWN


def test_rows_come_when_they_are_looked_at_and_show_what_was_found(chromium, page):
    chromium.open(page)
    assert 0 < len(chromium.run(SHOWN)) < CASES
    assert chromium.run("document.querySelector('.filters output').textContent") == f"{CASES} of {CASES}"
    chromium.run("document.querySelector('.more').click(), document.querySelector('.more').click()")
    assert chromium.run("document.querySelector('.more').hidden")
    rows = "[...document.querySelectorAll('#cases tbody tr[id^=case-]')].map(r => [...r.cells].map(c => c.innerText))"
    for row, result in zip(chromium.run(rows), results(), strict=True):
        told = row[0], row[1].partition("\n")[0]
        assert told == (result.status.value, str(result.case)), row
        assert [cell.partition("\n")[0] for cell in row[2:]].count(ratio_text(result.ratio)) == len(result.verdicts)


@pytest.mark.slow
def test_columns_sort_both_ways(chromium, page):
    chromium.open(page)
    every = results()
    order = [f"case-{i}" for i in sorted(range(CASES), key=lambda i: -every[i].ratio)]
    found = chromium.run(SORTED.format("y"))
    assert found == order[: len(found)]
    assert chromium.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    assert chromium.run(SORTED.format("y"))[-1] != found[-1]
    assert chromium.run(SORTED.format("status"))[0] == "case-3"  # the worst first


@pytest.mark.slow
def test_filters_choose(chromium, page):
    chromium.open(page)
    pick = "const s = document.querySelector('select'); s.value = [...s.options].find(o => o.text === 'FAIL').value"
    chromium.run(f"(() => {{ {pick}; s.dispatchEvent(new Event('input', {{bubbles: true}})); }})()")
    wrong = [f"case-{i}" for i, r in enumerate(results()) if r.status == Status.FAIL]
    assert chromium.run(SHOWN) == wrong
    type_ = "const i = document.querySelector('input'); i.value = ' 5x3x4x5 NHWC '"
    chromium.run(f"(() => {{ {type_}; i.dispatchEvent(new Event('input', {{bubbles: true}})); }})()")
    assert chromium.run(SHOWN)[0] == "case-3"


@pytest.mark.slow
def test_the_error_is_shown_by_channel_and_position(chromium, page):
    chromium.open(page)
    cells = "[...document.querySelectorAll('#details-3 .picture div')].map(r => [...r.children].map(c => c.className))"
    shown = f"(location.hash = '#case-3', await new Promise(r => setTimeout(r, 50)), {cells})"
    assert chromium.run(shown) == [["l-0", "l-0", "l-9"], ["l-x", "l-0", "l-1"]]
    colours = "new Set([...document.querySelectorAll('.picture i')].map(c => getComputedStyle(c).backgroundColor)).size"
    assert chromium.run(colours) == 4


@pytest.mark.slow
def test_every_link_leads_somewhere(chromium, page):
    chromium.open(page)
    links = "[...new Set([...document.querySelectorAll('figure a, p a')].map(a => a.getAttribute('href') ?? "
    links = chromium.run(links + "a.getAttribute('xlink:href')))]")
    wrong = {f"#case-{i}" for i, r in enumerate(results()) if r.status == Status.FAIL}
    assert {link for link in links if link.startswith("#case-")} == wrong  # of the plots, too
    assert "#cause-1" in links
    for link in ("#case-3", "#case-247"):  # the second one's row is not there before
        shown = f"(location.hash = '{link}', await new Promise(r => setTimeout(r, 50)), "
        shown += f"document.querySelector('#details-{link[6:]}').innerText)"
        text = chromium.run(shown)
        assert f"pybnorm check --backend cudnn --case '{results()[int(link[6:])].case}'" in text
        assert "0,1,2,9" in text
    count = "document.querySelector('.filters output').textContent"
    told = chromium.run(f"(location.hash = '#cause-1', await new Promise(r => setTimeout(r, 50)), {count})")
    assert told == f"{len(wrong)} of {CASES}"


@pytest.mark.slow
def test_a_link_from_elsewhere_opens_its_case_and_a_command_is_copied(chromium, page):
    chromium.open("/dev/null")
    chromium.open(page, "#case-200")
    assert chromium.run("document.getElementById('details-200').getBoundingClientRect().top < innerHeight")
    assert chromium.run("document.querySelectorAll('.verdict + .command .copy').length") == 1
    copied = "(document.querySelector('.copy').click(), await new Promise(r => setTimeout(r, 200)), "
    assert chromium.run(copied + "document.querySelector('.copy').textContent)") == "Copied"


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_is_as_wide_as_the_screen(chromium, folder, width):
    chromium.size(width, 900)
    for file in folder.glob("*.html"):
        chromium.open(file, "#case-3")
        assert chromium.run("document.documentElement.scrollWidth") <= width
        rows = ", .scroll > table:not(.mono) > tbody > tr > *" if width == 390 else ""  # but for elements of a case
        seen = f"#details-3 .copy, #details-3 pre, caption, .panels svg{rows}"
        assert chromium.run(BEYOND.format(seen)) == []


BEYOND = (  # what is not seen without scrolling the table, and what is cut off on paper
    "[...document.querySelectorAll('{}')].filter(e => e.getBoundingClientRect().right >"
    " document.querySelector('h2').getBoundingClientRect().right + 1).map(e => e.outerHTML.slice(0, 90))"
)


@pytest.mark.slow
def test_paper_cuts_nothing_off(chromium, folder):
    for file in folder.glob("*.html"):
        with chromium.printed():
            chromium.open(file)
            assert chromium.run("getComputedStyle(document.querySelector('.filters')).display") == "none"
            assert chromium.run(BEYOND.format("th, td, pre, figure")) == []


@pytest.mark.slow
def test_text_of_a_library_is_text(chromium, tmp_path, folder):
    hostile = made_result(Status.CRASHED, "infer,spatial,f32,nchw,2x3x4x5", message="</script><b id=evil>\u202e&amp;")
    html.write(tmp_path / "page.html", machine(), INFOS, [hostile])
    chromium.open(tmp_path / "page.html", "#case-0")
    assert chromium.run("document.getElementById('evil')") is None
    assert r"</script><b id=evil>\u202e&amp;" in chromium.run("document.getElementById('details-0').innerText")


@pytest.mark.slow
def test_the_page_of_a_comparison(chromium, folder):
    chromium.open(folder / "comparison.html", "#case-0")
    assert len(chromium.run(SHOWN)) == 2
    assert "reference" in chromium.run("document.getElementById('details-0').innerText")


def contrast(one, other):
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_the_contrast_of_wcag_aa(page):
    text = page.read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", t)) for t in re.findall(r":root \{(.*?)\}", text)[:2])
    light = {name: "#ffffff" if value == "#fff" else value for name, value in light.items()}
    for theme in (light, dark):
        for text in ("text", "faint", "link"):
            for back in ("back", "panel"):
                assert contrast(theme[text], theme[back]) >= 4.5, (text, back)
        for name, colour in COLOURS.items():
            assert contrast(colour, theme["back"]) >= 3, name
    for name, colour in COLOURS.items():
        assert contrast(colour, "#ffffff") >= 4.5, name
