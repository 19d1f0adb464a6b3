"""What `--explain` says of a case is what was judged."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from tables import table

from pybnorm.check.judging.bounds import Status, expect, tiers
from pybnorm.check.judging.bounds.terms import terms
from pybnorm.check.judging.results import BackendInfo
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import COMPOSED, Problem
from pybnorm.check.report.explain import explain, explain_line, lines
from pybnorm.check.run import worker
from pybnorm.check.run.guarded import execute
from pybnorm.check.selftest.simulated import session
from pybnorm.cli import main


def causes_of(line):
    """The causes of the bounds of a case, whose terms add up to each of them."""
    problem = Problem.parse(line)
    expected = expect(problem, generate(problem))
    causes = set()
    for output in expected.outputs:
        classes = tiers(problem, output)
        for part in expected.parts(output, None, classes):
            for local in {(0,) * part.reference.ndim, tuple(n - 1 for n in part.reference.shape)}:
                index = tuple(i + s.start for i, s in zip(local, part.index, strict=True))
                for tier, (bound, _) in zip(classes, part.classes, strict=True):
                    found = terms(expected, output, index, tier)
                    assert all(term.size >= 0 for term in found)
                    assert np.isfinite(bound).all()
                    assert sum(term.size for term in found) == pytest.approx(bound[local], rel=1e-9)
                    causes |= {term.cause.partition(":")[0] for term in found}
    return causes


@pytest.mark.parametrize("fill", ["fill=randn,kappa=3", "fill=exact"])
@pytest.mark.parametrize(
    "line",
    [
        "train,spatial,f32,nchw,8x3x16x16",
        "train,peract,bf16,nchw,3x4x2x2,alpha=2,beta=0.5",
        "train,spatial,f16,nchw,4x3x4x4,params=f16",
        "infer,spatial,f64,nhwc,4x3x4x4,alpha=-1",
        "backward,spatial,f32,nchw,8x3x16x16,beta=1,beta_param=0.5,alpha_param=3",
        "backward,spatial,f16,nchw,4x3x4x4,saved=0,params=f16",
        "backward,peract,f32,nchw,3x4x2x2",
    ],
)
def test_the_terms_of_a_bound_add_up_to_it(line, fill):
    causes_of(f"{line},{fill}")


@pytest.mark.parametrize(
    "line",
    [
        *(f"{word},spatial,f32,nchw,4x3x4x4" for word in COMPOSED if word not in ("elemt", "gather_stats")),
        "frozen,spatial,bf16,nchw,4x3x4x4,alpha=3,beta=1",
        "sync_backward,spatial,f16,nchw,9x3x4x4,fill=randn,ranks=3",
        "gather_stats,spatial,f32,nchw,4x3",
        "train,spatial,bf16,nchw,4x3x4x4,fill=randn,activation=relu,residual=1",
    ],
)
def test_a_bound_of_other_formulas_is_told_by_its_causes(line):
    causes = causes_of(line)
    assert len(causes) >= 3
    assert {"the result, stored", "parameters and vectors, stored"} & causes


def told(style, bug, line):
    return explain_line(lambda backend: session(style, bug), "onednn", line)


def test_a_case_that_passes_says_by_which_class_and_what_it_would_have_noticed():
    line = "train,spatial,f32,nchw,4x3x3x4,fill=randn"
    result, explanation = told("two_pass", None, line)
    assert result.status == Status.PASS
    assert [shown.output for shown in explanation.outputs] == [v.output for v in result.verdicts]
    for shown, verdict in zip(explanation.outputs, result.verdicts, strict=True):
        assert (shown.status, shown.decided_by, shown.noticed) == (verdict.status, verdict.tier, verdict.noticed)
        assert [held.name for held in shown.classes] == ["A"]
        assert shown.not_needed == ["B"]
        assert shown.classes[0].ratio == verdict.ratio
        assert shown.classes[0].noticed == verdict.noticed > 0
    text = list(lines(explanation))
    assert max(map(len, text)) <= 80
    assert any("smallest relative error that would have been noticed" in one for one in text)


@pytest.mark.slow
def test_an_excuse_is_shown_with_its_reason():
    problem = Problem.parse("train,spatial,f32,nchw,32x16x56x56")
    inputs = generate(problem)
    outputs = execute(problem, inputs, session()).outputs
    outputs["saved_mean"] = np.nextafter(outputs["saved_mean"], np.float32(9))
    outputs["saved_inv_variance"] *= np.float32(1 + 3e-6)
    explanation = explain(problem, expect(problem, inputs), outputs)
    granted = {shown.output: shown.excuse for shown in explanation.outputs if shown.excuse}
    assert granted == {"saved_inv_variance": "granted: no output of the call shows that sums were not rounded"}
    _, explanation = told("two_pass", "biased running variance", "train,spatial,f32,nchw,32x32x56x56")
    refused = {shown.output: shown.excuse for shown in explanation.outputs if shown.excuse}
    assert set(refused) == {"running_variance"}
    assert refused["running_variance"].startswith("refused: not within ")
    assert explanation.scatter < 3


def test_the_command(monkeypatch):
    """Over workers that call simulated kernels without a process."""
    monkeypatch.setattr(worker.Worker, "describe", lambda self: BackendInfo(self.backend, path="here"))
    call = lambda self, function, opener, *rest, timeout: function(lambda name: session(), *rest)  # noqa: E731
    monkeypatch.setattr(worker.Worker, "call", call)
    line = "backward,spatial,bf16,nchw,2x3x5x5"
    done = CliRunner().invoke(main, ["check", "--backend", "onednn", "--explain", line])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"PASS onednn {line}\n50 terms in a sum")
    done = CliRunner().invoke(main, ["check", "--backend", "onednn", "--explain", line, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == "pybnorm.explain/1"
    (case,) = document["cases"]
    assert case["result"]["status"] == "PASS"
    assert {shown["output"] for shown in case["explanation"]["outputs"]} == {"dx", "dscale", "dbias"}
    terms_ = case["explanation"]["outputs"][0]["classes"][0]["terms"]
    assert all(set(term) == {"cause", "size"} for term in terms_)


@table(
    ("case", "told"),
    [
        ("train/infer,spatial,f32,nchw,2x3x4x4", "one case; these are 2: train,spatial,f32,nchw,2x3x4x4 and infer,"),
        ("train/infer/backward,spatial,f32,nchw,2x3x4x4", "these are 3: "),
        ("smoke", "this is a suite, whose cases pybnorm check --list --suite smoke prints"),
        ("", "--explain: got , allowed: operation,mode,dtype,layout,dims[,option=value...]"),
        ("train,spatial,f32,nchv,2x3x4x4", "--explain train,spatial,f32,nchv,2x3x4x4: layout: got nchv"),
    ],
)
def test_what_is_not_one_case_is_told(case, told):
    done = CliRunner().invoke(main, ["check", "--explain", case])
    assert (done.exit_code, told in done.output) == (2, True)


@table("more", [["-v"], ["--suite", "smoke"], ["--jobs", "2"], ["--executor", "process"]])
def test_what_it_cannot_be_combined_with_is_refused(more):
    done = CliRunner().invoke(main, ["check", "--explain", "infer,spatial,f32,nchw,2x3x4x4", *more])
    assert done.exit_code == 2
    assert f"beside {more[0].replace('-v', '--verbose')}" in done.output
