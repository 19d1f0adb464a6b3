"""Cases of which it is kept that they notice a change of each input."""

import random

import pytest

from pybnorm.check import trusted
from pybnorm.check.bounds import untrusted
from pybnorm.check.data import generate
from pybnorm.check.problem import Problem, load_suite

LINE = "train,spatial,f32,nchw,4x3x5x2,fill=randn"


def test_the_file_is_of_this_code():
    assert trusted.kept(), "run python ci/trusted-lines.py"


def test_other_code_counts_for_nothing(tmp_path, monkeypatch):
    root, package = trusted._HERE.parent, tmp_path / "pybnorm" / "check"
    for pattern in trusted.SOURCES:
        for source in root.glob(pattern):
            target = tmp_path / "pybnorm" / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    right = trusted.fingerprint()
    monkeypatch.setattr(trusted, "_HERE", package)
    assert trusted.fingerprint() == right
    (package / trusted.FILE_NAME).write_text(f"{right}\n{0:016x}\n")
    assert trusted.kept.__wrapped__() == {0}
    with (package / "data.py").open("a") as file:
        file.write("\n")
    assert trusted.kept.__wrapped__() == frozenset()
    (package / "data.py").unlink()
    assert trusted.kept.__wrapped__() == frozenset()


def test_what_is_kept_is_so():
    known = [p for p in load_suite("smoke") if trusted.digest(p) in trusted.kept()]
    assert len(known) > 300
    assert not any(untrusted(p, generate(p)) for p in random.Random(5).sample(known, 12))


@pytest.mark.parametrize("other", ["infer,spatial,f32,nchw,4x3x5x2,fill=randn", LINE + ",seed=1", LINE + ",alpha=2"])
def test_another_case_has_another_digest(other):
    assert trusted.digest(Problem.parse(other)) != trusted.digest(Problem.parse(LINE))


def test_how_a_case_is_called_makes_no_difference():
    one, other = Problem.parse(LINE), Problem.parse(LINE.replace("nchw", "nhwc") + ",misalign=1,repeats=5")
    assert trusted.digest(one) == trusted.digest(other)
    assert trusted.digest(one, True) != trusted.digest(one)


def test_a_case_that_is_not_kept_is_asked(monkeypatch):
    """And only once in a process."""
    asked = []
    monkeypatch.setattr(trusted, "kept", frozenset)
    monkeypatch.setattr(trusted, "_found", {})
    monkeypatch.setattr(trusted, "computed", lambda *arguments: asked.append(arguments) or ["bias"])
    problem = Problem.parse(LINE)
    inputs = generate(problem)
    assert trusted.untrusted(problem, inputs) == trusted.untrusted(problem, inputs) == ["bias"]
    assert asked == [(problem, inputs, False)]
