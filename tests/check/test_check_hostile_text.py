"""What came from outside is shown and never obeyed, on the terminal, in messages and in reports."""

import io
import json
import re
import sys
import unicodedata

import click
import pytest
from command_here import run
from made_runs import made_document, made_result
from rich.table import Table
from rich.text import Text

import pybnorm
from pybnorm import cli, errors
from pybnorm._text import one_line, visible
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import to_json
from pybnorm.check.report import html as page
from pybnorm.check.report import junit, terminal
from pybnorm.check.report.console import Console
from pybnorm.check.run.environment import machine
from pybnorm.check.run.runner import BackendInfo

FAKE = "onednn: 5 cases, 5 PASS"
EVIL = f"\x1b]0;title\x07\x1b[2J\x9b1A\x00\x7f\r\u202egnp.\u2066\u2028\ufeff[/bold][red]\n{FAKE}\n"
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
LINE = "train,spatial,f32,nchw,2x3x4x5,fill=randn"


def assert_harmless(text, *, fakes=True):
    """No character but newlines and tabs that a terminal obeys or that does not show; no line of ours made up."""
    bad = {c for c in text if unicodedata.category(c) in HIDDEN and c not in "\n\t"}
    assert not bad, (bad, text)
    assert not fakes or not any(line.strip() == FAKE for line in text.splitlines()), text


def command(*arguments, status=2, **variables):
    done = run(*arguments, **variables)
    assert done.returncode == status, (arguments, done.stdout, done.stderr)
    assert_harmless(done.stdout + done.stderr)
    return done.stdout + done.stderr


def test_every_character_that_is_no_mark_on_the_screen_is_written_out():
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character) in HIDDEN:
            escaped = character.encode("unicode_escape").decode()
            assert one_line(character) == (character if character == "\t" else escaped), escaped
            assert visible(character) == (character if character in "\t\n" else escaped), escaped
    plain = "".join(chr(i) for i in range(0x20, 0x30000) if unicodedata.category(chr(i))[0] in "LMNPS")
    assert one_line(plain) == plain
    assert visible("a\nb\tü 漢") == "a\nb\tü 漢"


def test_a_console_shows_what_it_is_given_and_keeps_its_own_styles():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=60)
    table = Table(title=Text(EVIL))
    table.add_column(EVIL)
    table.add_row(EVIL)
    table.add_row(Text(EVIL, "green"))
    for what in (EVIL, Text.assemble(("bold\x1b[8m", "bold"), " plain"), table):
        console.print(what)
    console.print("long \x1b[2J" * 20, soft_wrap=True)
    text = stream.getvalue()
    assert "\x1b[1mbold\\x1b[8m\x1b[0m plain\n" in text  # the style ends where it did
    assert "[/bold][red]" in text
    assert_harmless(re.sub(r"\x1b\[[\d;]*m", "", text), fakes=False)


def test_values_in_error_messages_are_on_one_line():
    vendor = {"backend": "onednn", "function": "f", "status": 1, "status_name": "S", "library": "/x"}
    for error in (
        errors.ArgumentError(EVIL, EVIL, EVIL),
        errors.ArgumentTypeError("x", [EVIL], "y"),
        errors.LibraryNotFoundError("no file", backend="onednn", attempts=((EVIL.strip(), "file", "reason"),)),
        errors.VendorError(text=f"first {EVIL}", descriptors=("d",), **vendor),
    ):
        assert_harmless(str(error), fakes=isinstance(error, errors.ArgumentError))
    error.add_text(EVIL)
    assert_harmless(str(error), fakes=False)
    assert str(errors.ArgumentError("a", "b\nc", "d")) == "a: got b\\nc, allowed: d"


@pytest.mark.slow
def test_arguments_files_and_variables_do_not_reach_the_terminal_as_they_are(tmp_path, monkeypatch):
    suite = tmp_path / f"suite{EVIL.replace('/', '').replace(chr(0), '')}"
    suite.write_text(f"train,{EVIL},f32,nchw,2x3\n")
    line = "train,spatial,f32,nchw,2x3"
    for case in (f"train,{EVIL},f32,nchw,2x3", f"{line},{EVIL}=1", f"{line},algorithm={EVIL}"):
        command("check", "--case", case)
    for option in ("--suite", "--backend", "--executor", "--jobs", "--junit"):
        command("check", option, EVIL)
    for option in ("--suite", "--json", "--save"):
        command("check", option, suite)
    for arguments in (["check", f"--{EVIL}"], [EVIL], [f"--{EVIL}"], ["info", "--claims", EVIL], ["compare", EVIL]):
        command(*arguments)
    named = EVIL.replace("\0", "")
    command("check", PYBNORM_REQUIRE=named)
    everywhere = {f"PYBNORM_LIB_{name.upper()}": f"/nowhere/{named}" for name in pybnorm.backends()}
    monkeypatch.setattr(pybnorm, "backends", lambda: ("cudnn",))
    assert "/nowhere/\\x1b]0;title\\x07" in command("info", status=0, **everywhere)
    command("info", "--json", status=0, **everywhere)
    command("check", "--backend", "cudnn", status=1, **everywhere)


def test_what_click_says_is_shown():
    """Its newer releases write most of it out themselves."""
    with pytest.raises(click.UsageError) as caught, cli._shown():
        raise click.UsageError(f"No such option: {EVIL}")
    assert_harmless(caught.value.format_message(), fakes=False)
    assert "\\x1b]0;title" in caught.value.format_message()


def evil(value):
    """Every text of a document made evil but those that say what is what."""
    if isinstance(value, dict):
        fixed = ("schema", "status", "case", "backend", "output", "saved", "ratio", "ratios", "finite_ratio", "got")
        return {k: v if k in fixed else evil(v) for k, v in value.items()}
    if isinstance(value, list):
        return [evil(v) for v in value]
    return f"{value}{EVIL}" if isinstance(value, str) else value


def test_runs_of_others_are_shown(tmp_path, plots):
    for name, version in (("a", (1, 0)), ("b", (2, 0))):
        infos = [BackendInfo("cudnn", "cuDNN", version, "/lib", "made", (("a", "b", "c"),), "device")]
        results = [made_result(s, f"{LINE},seed={i}") for i, s in enumerate(Status)]
        if name == "b":
            results = [*reversed(results[1:]), *(made_result(Status.FAIL, line) for line in (f"{LINE}{EVIL}", LINE))]
            infos += [BackendInfo(f"x{EVIL}", problem="gone", override=EVIL)]
        document = json.loads(json.dumps(to_json(made_document(infos, results))))
        if name == "b":
            for i, case in enumerate(document["cases"]):
                case["status"] = results[(i + 1) % len(results)].status.value
        (tmp_path / name).write_text(json.dumps(evil(document)))
    shown = command("compare", "-v", f"--html={tmp_path / 'page'}", str(tmp_path / "a"), str(tmp_path / "b"), status=1)
    assert "known defect \\x1b]0;title\\x07" in shown
    assert_harmless((tmp_path / "page").read_text())
    assert "<script>alert" not in (tmp_path / "page").read_text()


@pytest.mark.slow
def test_what_a_vendor_says_is_shown(plots):
    results = [made_result(s, LINE, message=f"vendor: {EVIL}", known=EVIL, claim=EVIL) for s in Status]
    infos = [BackendInfo("cudnn", EVIL, (1,), EVIL, EVIL, ((EVIL, EVIL, EVIL),), EVIL, problem=p) for p in ("", EVIL)]
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    terminal.print_backends(console, infos)
    terminal.print_results(console, results, True)
    terminal.print_details(console, results, True)
    environment = machine() | {"host": EVIL, "cpu": EVIL, "drivers": {EVIL: EVIL}}
    junit.write(stream, environment, infos, results)
    page.write(stream, environment, infos, results)
    assert_harmless(stream.getvalue(), fakes=False)
