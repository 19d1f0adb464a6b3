"""The benchmark of what avoiding defects costs measures both sides of each, and says which fails."""

import math

import pytest

import pybnorm
from benchmarks import avoid
from pybnorm import defects
from pybnorm.check.problem import Problem

DEFECTS = {d.id: d for d in defects.DEFECTS}


@pytest.mark.parametrize(("defect", "line"), [(d, line) for d, lines in avoid.PROBLEMS.items() for line in lines])
def test_each_problem_meets_its_defect(defect, line):
    of = DEFECTS[defect]
    versions = [(*v, 0) for v in (of.first, of.last) if v is not None]
    met = [pybnorm.known_defects(of.backend, Problem.parse(line), version=v) for v in versions]
    assert any(of in found for found in met), line


def test_a_row_has_both_sides(need_device, monkeypatch):
    need_device("onednn")
    made = []

    class Counted(avoid._Side):
        def __init__(self, handle, device, problem, algorithm):
            super().__init__(handle, device, problem, algorithm)
            made.append((algorithm, self.plan.algorithm))

    monkeypatch.setattr(avoid, "_Side", Counted)
    (cost,) = avoid.measure("onednn", 2, [("onednn-long-sums", "train,spatial,f32,nchw,1x2x700x700")])
    assert made == [("auto", "rows"), ("plain", "plain")]
    assert (cost.way, cost.data) == ("rows", 4 * 2 * 700 * 700)
    assert min(cost.plain, cost.avoiding, cost.median) > 0
    assert not list(avoid.measure("onednn", 1, [("onednn-long-sums", "train,spatial,f32,nchw,2x2x6x7")]))  # has none


def test_a_call_that_fails_has_no_ratio():
    row = avoid.Cost("miopen-x", "train", 2e-3, 3e-3, 1.4, "auto", 2**21, 2**20)
    text = avoid.render([row, row._replace(plain=math.nan, median=math.nan)])
    head, first, second = text.splitlines()
    assert head.split()[:3] == ["defect", "problem", "plain"]
    assert first.split() == ["x", "train", "2.00", "3.00", "+50%", "+40%", "auto", "2.00", "1.00"]
    assert second.split() == ["x", "train", "fails", "3.00", "-", "-", "auto", "2.00", "1.00"]


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(avoid, "measure", lambda backend, rounds, problems: [])
    assert avoid.main(["onednn", "--rounds", "1"]) == 1
    assert "oneDNN" in capsys.readouterr().out
    for wrong in (["nothing"], ["onednn", "--rounds", "0"]):
        with pytest.raises(SystemExit):
            avoid.main(wrong)
