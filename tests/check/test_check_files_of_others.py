"""Every file that a command reads, changed in every field: a result, or one sentence that names the file.

Files are data (SECURITY.md). `changes` makes of a document one with a field of another value, of another type, or
without it; `broken` makes of any file what a disk, a stranger or another program leaves in its place.
"""

import contextlib
import copy
import functools
import io
import itertools
import json
import os
import shutil
import signal
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from made_runs import made_result, make_run

from pybnorm import _files, cli, graph, hipdnn, layer
from pybnorm.check.compare import versions
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.results import LostNode, to_json
from pybnorm.check.judging.which import read_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.check.language.vendor_lines_read import read_all
from pybnorm.check.report import plots
from pybnorm.check.run import archive, support
from pybnorm.errors import ArgumentError

LINE = "train,spatial,f32,nchw,2x3x4x5,fill=randn"
SECONDS = 20
"""That any of these may take; most take some milliseconds."""
STRINGS = ("", "\ud800", "a\nb\x1b[2J", "../../x", "inf", "é" * 3000)
NUMBERS = (-1, 0, 10**30, 1e308, float("nan"), True)
TYPES = ("text", 7, 0.5, None, True, [], {}, [[]], [None], {"a": {}}, 10**400)
GONE = object()


def changes(value, turn=0):
    """(where, document) for each field with another value, with another type, and without it.

    The values take turns: each field has some of them, and all fields together have all. Of a list, its first item
    stands for all.
    """
    for number, (path, old) in enumerate(places(value), turn):
        texts = STRINGS if isinstance(old, str) else NUMBERS if isinstance(old, (int, float)) else ([], {})
        others = [other for other in TYPES if type(other) is not type(old)]
        for new in (texts[number % len(texts)], others[number % len(others)], GONE):
            changed = copy.deepcopy(value)
            *to, last = path
            place = changed
            for step in to:
                place = place[step]
            if new is GONE:
                del place[last]
            else:
                place[last] = new
            yield f"{'.'.join(map(str, path))} = {'nothing' if new is GONE else repr(new)[:40]}", changed


def places(value, path=()):
    """The path of every field, with what is there."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name), item
        yield from places(item, (*path, name))


@functools.cache
def bomb():
    """An archive a thousand times its size."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in ("run.json", "x.npy"):
            with file.open(name, "w") as stream:
                np.lib.format.write_array_header_1_0(
                    stream, {"descr": "|u1", "fortran_order": False, "shape": (99 << 20,)}
                )
                for _ in range(99):
                    stream.write(bytes(1 << 20))
    return made.getvalue()


def broken(content):
    """(what, put) for every way in which a file is none: `put` makes it at a path."""
    whole = content if isinstance(content, bytes) else content.encode()
    contents = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "all but one": whole[:-2],
        "not UTF-8": b"\xff\xfe" + whole,
        "Latin-1 within": whole.replace(b'"', b'"\xe9', 4),
        "a null byte": whole[:20] + b"\0" + whole[20:],
        "a huge number": b"[" + b"9" * 10_000 + b"]",
        "a number of its own": b"1e999",
        "deep": b"[" * 200_000,
        "deep names": b'{"a":' * 200_000,
        "a list": b"[1, [], {}, null]",
        "null": b"null",
        "another zip": bomb(),
    }
    puts = {what: lambda path, data=data: path.write_bytes(data) for what, data in contents.items()}
    links = {"a dangling link": "nowhere", "a link to itself": "", "a device": "/dev/zero"}
    puts |= {what: lambda path, to=to: path.symlink_to(to or path.name) for what, to in links.items()}
    puts |= {"a pipe": os.mkfifo, "a folder": lambda path: path.mkdir(), "no file": lambda path: None}

    def anew(put, path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        put(path)

    return [(what, functools.partial(anew, put)) for what, put in puts.items()]


def each_change(file, document, turn=0):
    """What is changed, as often as the file holds another document."""
    for what, changed in changes(document, turn):
        file.write_text(json.dumps(changed))
        yield what


def each_break(file, content):
    """What is there in place of the file."""
    for what, put in broken(content):
        put(file)
        yield what


@contextlib.contextmanager
def limited(what):
    """Nothing takes longer than `SECONDS`."""

    def end(*_):
        raise AssertionError(f"{what}: no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Faults(list):
    """What is no result and no sentence; told all at once, when the test ends."""

    def command(self, what, *arguments, names=""):
        with limited(what):
            done = CliRunner().invoke(cli.main, [*map(str, arguments)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            self.append(f"{arguments[0]} with {what}: {done.exception!r}")
        elif done.exit_code == 2 and names and names not in done.output and "Nothing to compare" not in done.output:
            self.append(f"{arguments[0]} with {what}: {names} is not named: {done.output[-300:]}")
        return done

    def call(self, what, function, *arguments, names=""):
        try:
            with limited(what):
                return function(*arguments)
        except ArgumentError as error:
            if names and names not in str(error):
                self.append(f"{getattr(function, '__qualname__', function)} with {what}: {names} is not named: {error}")
        except Exception as error:
            self.append(f"{getattr(function, '__qualname__', function)} with {what}: {error!r}")
        return None


@pytest.fixture
def faults():
    found = Faults()
    yield found
    assert not found, f"{len(found)} faults:\n" + "\n".join(found)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder of check --save with a result of several statuses."""
    monkeypatch.setattr(versions, "packaged_suites", lambda: ("smoke",))  # all of them take seconds to read
    folder = make_run(tmp_path / "good", "cudnn", [LINE])
    document = json.loads((folder / "run.json").read_text())
    wrong = to_json(made_result(Status.FAIL, LINE, known="a", saved=document["cases"][0]["saved"]))
    wrong["verdicts"][1:] = document["cases"][0]["verdicts"][1:]
    document["cases"] = [wrong]
    document["backends"][0] |= {"attempts": [["a", "b", "c"]], "variables": {"A": "1"}, "cpu_flags": ["avx"]}
    document["lost_nodes"] = [to_json(LostNode("1", "host", "", "gone"))]
    (folder / "run.json").write_text(json.dumps(document))
    return folder


def readers(path, good):
    """Every command that reads a run."""
    yield "report", path, "-v"
    yield "report", path, "--json", "-"
    yield "report", path, "--markdown", "-"
    yield "report", path, "--junit", path.parent / "junit"
    yield "report", path, "--annotations"
    yield "compare", good, path
    yield "compare", path, path, "--json", "-"
    yield "versions", good, path, "--markdown", path.parent / "markdown"
    yield "claims", "record", path, "--backend", "cudnn"


@pytest.mark.slow
def test_a_run_changed_in_every_field(tmp_path, run, faults):
    """The three changes of a field are read by a third of the commands each."""
    file = tmp_path / "x.json"
    for number, what in enumerate(each_change(file, json.loads((run / "run.json").read_text()))):
        if faults.call(what, archive.read_run, file, names="x.json") is not None:
            for arguments in itertools.islice(readers(file, run), number % 3, None, 3):
                faults.command(what, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.json", "x.zip"])
def test_a_file_that_is_no_run(tmp_path, run, faults, name):
    for what in each_break(tmp_path / name, (run / "run.json").read_bytes()):
        for arguments in readers(tmp_path / name, run):
            faults.command(what, *arguments, names=name)


def test_an_archive_of_collect(tmp_path, run, faults):
    for what in each_break(tmp_path / "content", (run / "run.json").read_bytes()):
        if (tmp_path / "content").is_file():
            with zipfile.ZipFile(tmp_path / "x.zip", "w") as made:
                made.write(tmp_path / "content", "run.json")
            faults.command(what, "report", tmp_path / "x.zip", names="x.zip")


@pytest.mark.slow
def test_a_page_of_a_changed_run(tmp_path, run, monkeypatch, faults):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.json"
    for number, what in enumerate(each_change(file, json.loads((run / "run.json").read_text()), 3)):
        with monkeypatch.context() as patch:
            if number % 60:  # plots take a second
                for plot in ("heat_map", "strips"):
                    patch.setattr(plots, plot, lambda *_: "")
            if number % 3 == 0:
                faults.command(what, "report", file, "--html", tmp_path / "page", names="x.json")


@pytest.mark.slow
def test_a_name_that_utf_8_cannot_hold(tmp_path):
    """Such as --implementation of a file whose name is in Latin-1."""
    pytest.importorskip("matplotlib")
    result = made_result(Status.FAIL, LINE, "k\udcff.py:K")
    assert archive.write_outputs(tmp_path, result.backend, Problem.parse(result.case), {"y": np.zeros(3)})
    assert "udcff" in plots.heat_map([result], [result.backend])
    assert "udcff" in plots.strips({result.backend: [("y", 2.0, "FAIL", 0)]})


@pytest.mark.slow
def test_a_journal_changed_in_every_field(tmp_path, run, faults):
    folder = tmp_path / "begun"
    with archive.Journal(folder) as journal:
        journal.begin(archive.read_run(run)["backends"])
        journal.append(made_result(Status.FAIL, LINE))
    file = folder / "journal.jsonl"
    whole = file.read_bytes()
    start, case = map(json.loads, whole.splitlines())
    for number, line in enumerate((start, case)):
        for count, (what, changed) in enumerate(changes(line, number)):
            lines = [start, case]
            lines[number] = changed
            file.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
            resumed(faults, what, folder)
            if faults.call(what, archive.read_run, folder, names="journal.jsonl") is not None:
                for arguments in itertools.islice(readers(folder, run), count % 9, None, 9):
                    faults.command(what, *arguments)
    for what in each_break(file, whole):
        faults.command(what, "report", folder, names="begun")
        resumed(faults, what, folder)


def resumed(faults, what, folder):
    """A run that goes on in the folder."""

    def go_on():
        with archive.Journal(folder, resume=True) as journal:
            journal.begin([])

    faults.call(what, go_on, names="begun")


@pytest.mark.slow
def test_saved_outputs_changed_in_every_field(tmp_path, run, faults):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (file,) = (other / "outputs").iterdir()
    with np.load(file) as members:
        arrays = dict(members)
    header = json.loads(arrays["header"].tobytes())
    for what, changed in changes(header):
        arrays["header"] = np.frombuffer(json.dumps(changed).encode(), np.uint8)
        np.savez(file, **arrays)
        faults.command(what, "compare", run, other, names=file.name)
        faults.call(what, archive.read_outputs, other, f"outputs/{file.name}", names=file.name)
    for what in each_break(file, json.dumps(header)):
        faults.command(what, "compare", run, other, names=file.name)


@pytest.mark.slow
def test_tensors_changed_in_every_field(tmp_path, faults):
    dims = (2, 3, 4, 5)
    rng = np.random.default_rng(1)
    arrays = {"x": rng.standard_normal(dims, np.float32), "y": np.zeros(dims, np.float32)}
    arrays |= {"scale": np.ones(3, np.float32), "bias": np.zeros(3, np.float32), "epsilon": np.array(1e-5)}
    file = tmp_path / "x.npz"
    made = [np.array(value) for value in (0.0, "text", [1 + 2j], 10**18)] + [np.array(["a"], object), np.ones(3, bool)]
    made += [np.zeros((0, 3)), np.full(dims, np.nan), np.zeros((1,) * 20), np.zeros(3, [("a", "f4")])]
    made += [np.zeros((3, 1), ">f2"), np.array("2020", "M8[Y]")]

    def look(what):
        faults.call(what, read_call, str(file), names="x.npz")
        faults.command(what, "check", "--data", file, names="x.npz")
        line = f"train,spatial,f32,nchw,2x3x4x5,data={file}"
        faults.call(what, lambda: generate(Problem.parse(line)), names="x.npz")

    for name in (*arrays, "operation", "operation/x"):
        for new in (*made, GONE):
            with zipfile.ZipFile(file, "w") as archived:
                for member, array in (arrays | {name: new}).items():
                    if array is not GONE:
                        with archived.open(f"{member}.npy", "w") as stream:
                            np.lib.format.write_array(stream, array)
            look(f"{name} = {new!r:.60}")
    np.savez(file, **arrays)
    for what in each_break(file, file.read_bytes()):
        look(what)
    with file.open("wb") as stream:
        np.save(stream, arrays["x"])
    look("an array alone")


def test_records_of_claims_changed_in_every_field(tmp_path, run, monkeypatch, faults):
    monkeypatch.setenv("PYBNORM_CLAIMS", str(tmp_path))
    file = tmp_path / "cudnn.json"
    into = ("claims", "record", run, "--backend", "cudnn", "--into", tmp_path)
    assert CliRunner().invoke(cli.main, [*map(str, into)]).exit_code == 0
    records = json.loads(file.read_text())

    def check():
        support.records.cache_clear()
        return support.check("cudnn", (1, 0, 0), "a device", Problem.parse(LINE), Status.PASS, "y")

    assert check()
    for what in itertools.chain(each_change(file, records), each_break(file, json.dumps(records))):
        faults.call(what, check, names="cudnn.json")
        faults.command(what, *into, names="cudnn.json")
        if what in ("half", "a pipe"):
            faults.command(what, "check", "--backend", "cudnn", "--case", LINE, names="cudnn.json")
    support.records.cache_clear()


def graph_text():
    """Training and a backward, by which every field of the format is there."""
    made = graph.Graph().set_io_data_type("f32").set_compute_data_type("f32").set_intermediate_data_type("f32")
    sizes = {"dim": [2, 3, 4, 5], "stride": [60, 20, 5, 1]}

    def tensor(name, few=False):
        one = graph.TensorAttributes().set_name(name).set_data_type("f32")
        return one.set_dim([1, 3, 1, 1] if few else sizes["dim"]).set_stride([3, 1, 1, 1] if few else sizes["stride"])

    epsilon = graph.TensorAttributes().set_value(1e-5)
    x, scale, bias = tensor("x"), tensor("scale", True), tensor("bias", True)
    y, *_ = made.batchnorm(x, scale, bias, graph.BatchnormAttributes().set_name("bn").set_epsilon(epsilon))
    relu = made.pointwise(y, graph.PointwiseAttributes().set_mode("relu_fwd").set_relu_lower_clip(0.0))
    relu.set_output(True)
    return made.to_json()


def each_text(document):
    """(what, text) of a document in every way changed, and of what is none."""
    for turn in range(3):
        yield from ((what, json.dumps(changed)) for what, changed in changes(json.loads(document), turn))
    yield from texts(document)


def test_a_graph_changed_in_every_field(faults):
    for what, text in each_text(graph_text()):

        def validated(text=text):
            one = graph.Graph()
            one.from_json(text)
            one.validate()

        faults.call(what, validated)
        faults.call(what, hipdnn.Graph().from_json, text)


def test_the_state_of_a_layer_changed_in_every_field(faults):
    arrays = {name: np.ones((1, 3, 1, 1), np.float32) for name in layer.STATISTICS}
    sizes = (1, 3, 1, 1), (3, 1, 1, 1)
    info = layer.Info("spatial", "channels_first", "f32", layer.PROPAGATE_NAN, *sizes, 1e-5, 1.0, **arrays)
    assert layer.Info.from_json(info.to_json()) == info
    assert layer.Info.from_gocudnn_json(info.to_gocudnn_json())
    for what, text in each_text(info.to_json()):
        faults.call(what, layer.Info.from_json, text)
    for what, text in each_text(info.to_gocudnn_json()):
        faults.call(what, layer.Info.from_gocudnn_json, text)


def texts(made):
    """(what, text) for every way in which a text is none."""
    whole = made.encode()
    yield from {"empty": "", "half": made[: len(made) // 2], "deep": "[" * 200_000, "null": "null"}.items()
    yield from {"bytes": whole, "not UTF-8": b"\xff\xfe" + whole, "a huge number": "9" * 10_000}.items()
    yield from {"a number": 7, "a surrogate": "\ud800"}.items()


LINES = {
    "miopendriver": "./bin/MIOpenDriver bnorm -n 8 -c 16 -H 8 -W 8 -m 1 --forw 1 -b 0 -s 1 -r 1",
    "benchdnn": "--bnorm --dir=FWD_D --dt=f32 --tag=nchw --flags=CH --attr-post-ops=relu mb2ic3ih4iw5eps0.01",
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", LINES)
def test_lines_of_other_tools_changed_in_every_word(tool, faults):
    assert read_all(tool, LINES[tool]).found
    words = LINES[tool].split()
    new = [*STRINGS, "9" * 5000, "1e999", "-1", "0", "nan", "\0", "'", '"', "\\", "--batch=/dev/zero"]
    new += ["--batch=/", "\u0663"]
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        others = [[n] for n in new] + [[name + equals + n] for n in new] + [[], [word, word], [value], [name]]
        for other in others:
            text = " ".join([*words[:number], *other, *words[number + 1 :]])
            faults.call(text[:80], read_all, tool, text)
            faults.command(text[:80], "check", "--list", "--from", tool, text)


@pytest.mark.parametrize("kind", ["suite", "batch"])
def test_files_of_lines(tmp_path, kind, faults):
    file = tmp_path / "lines"
    content = f"# of cases\n{LINE}\n" if kind == "suite" else LINES["benchdnn"].removeprefix("--bnorm ")
    arguments = ["--suite", file] if kind == "suite" else ["--from", "benchdnn", f"--bnorm --batch={file}"]
    file.write_text(content)
    assert faults.command("as it is", "check", "--list", *arguments).exit_code == 0
    itself = ("itself", lambda p: p.write_text(f"include {p.name}\n--batch={p}\n"))
    for what, put in (*broken(content), itself):
        put(file)
        done = faults.command(what, "check", "--list", *arguments, names="lines")
        if done.exit_code == 0 and what not in ("all but one", "Latin-1 within"):
            faults.append(f"{kind} with {what}: {done.output}")


def test_a_file_that_is_longer_than_it_says_is_read_whole():
    """As those of /proc, of no bytes, and a file that grows."""
    assert _files.read("/proc/self/status", 1 << 20).count(b"\n") > 5
    with pytest.raises(OSError, match="larger than 10 bytes"):
        _files.read("/proc/self/status", 10)
