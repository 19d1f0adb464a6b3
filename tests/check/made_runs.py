"""Runs of libraries that do not exist: right by the reference, or wrong as told."""

import numpy as np

from pybnorm.check.judging.bounds import Point, Status, Verdict, expect, judge
from pybnorm.check.judging.results import SCHEMA, exit_status
from pybnorm.check.language.data import generate, round_to
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import archive
from pybnorm.check.run.environment import machine
from pybnorm.check.run.runner import BackendInfo, CaseResult


def right_outputs(problem):
    """What a library that rounds once would write, and what it is judged by."""
    expected = expect(problem, generate(problem))
    outputs = {}
    for name, values in expected.outputs.items():
        alpha, beta, prior = expected.blend(name)
        values = alpha * values + (beta * prior.astype(np.float64) if beta else 0)
        outputs[name] = round_to(values, problem.dtype if name in ("y", "dx") else problem.parameter_dtype)
    return expected, outputs


def nudged(array, ulps=1):
    """Every finite element moved by `ulps` in its type."""
    words = np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}")
    return np.where(np.isfinite(array.astype(np.float64)), words + ulps, words).view(array.dtype).reshape(array.shape)


def make_run(folder, backend, lines, version=(1, 0, 0), change=None, status=None, saves=True, document=None, known=""):
    """A folder as ``check --save`` makes it.

    ``change(line, name, array)`` gives what the library writes in place of the right array, or None for that;
    ``status(line)`` a status that leaves no outputs, or None; what is wrong, is by the defect `known`.
    """
    results = []
    for line in lines:
        problem = Problem.parse(line)
        made = status(line) if status else None
        if made is not None:
            results.append(CaseResult(backend, line, made, message="made up"))
            continue
        expected, outputs = right_outputs(problem)
        for name, array in outputs.items():
            changed = change(line, name, array.copy()) if change else None
            outputs[name] = array if changed is None else changed
        verdicts = [judge(expected, name, array) for name, array in outputs.items()]
        worst = max((v.status for v in verdicts), key=lambda s: s.severity)
        saved = archive.write_outputs(folder, backend, problem, outputs) if saves else ""
        explained = "" if worst.good else known
        results.append(CaseResult(backend, line, worst, verdicts, repeat="equal", saved=saved, known=explained))
    info = BackendInfo(backend, f"lib{backend}", version, f"/lib/{backend}.so", "made", device="a device")
    folder.mkdir(parents=True, exist_ok=True)
    made = made_document([info], results) | (document or {})
    archive.write_run(folder, made)
    return folder


def made_document(backends, results):
    """As ``check --json`` writes it."""
    return {
        "schema": SCHEMA,
        "environment": machine(),
        "backends": backends,
        "cases": results,
        "required_but_absent": [],
        "unusable_overrides": [],
        "complete": True,
        "exit_status": exit_status(results, []),
    }


def made_result(status, line="train,spatial,f32,nchw,2x3x4x5", backend="cudnn", **values):
    """A result of any status, with points where it has any."""
    verdicts = []
    if status in (Status.PASS, Status.WARN, Status.FAIL, Status.INCONCLUSIVE, Status.MISTRUSTED):
        own = status if status != Status.MISTRUSTED else Status.PASS
        ratio = {Status.PASS: 0.25, Status.WARN: 3.0, Status.FAIL: float("inf")}.get(own, 0.5)
        ratios = {"A": ratio, "B": 0.5} if own == Status.WARN else {"A": ratio}
        points = [Point((0, 1, 2, i), 1.25 + i, float("nan"), 1e-6, ratio) for i in range(10)]
        verdicts = [
            Verdict("y", own, "B" if own == Status.WARN else "A", ratio, ratios, 120, noticed=2e-5, worst=points)
        ]
        verdicts[0].over = 7 if own == Status.FAIL else 0
    message = "" if verdicts else f"made up: {status.value}\nsecond line"
    repeat = "equal" if verdicts else ""
    return CaseResult(backend, line, status, verdicts, **({"message": message, "repeat": repeat} | values))
