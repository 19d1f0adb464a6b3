"""Counts the bugs that the judge finds: faulty kernels on three classes of data, beside the required counts.

No class of data finds everything. Exact data show a dropped element and the wrong variance, whose effect is as small
as 1/m; a deviation of sqrt(epsilon) shows what is done with epsilon; random values with an offset show intermediate
results that were rounded to 16 bits. A setting is one dtype with one m; a bug is found in a setting if any output of
training or backward is FAIL or WARN. Correct kernels run as well, and whatever is not PASS there is a false alarm.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pybnorm.check.judging.bounds import Expected, Status, expect, judge
from pybnorm.check.language.data import Inputs, generate
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.guarded import execute
from pybnorm.check.run.session import Session
from pybnorm.check.selftest.simulated import session

DTYPES = ("f32", "f16", "bf16")
SHAPES = {12544: "16x4x28x28", 100352: "32x4x56x56"}
"""Dims by m; four channels, because the random fill has four deviations."""
SETTINGS = tuple((dtype, m) for m in SHAPES for dtype in DTYPES)
FILLS = {"randn": "fill=randn,kappa=0.5", "sqrteps": "fill=sqrteps,kappa=0.5", "exact": "fill=exact"}
OPERATIONS = ("train", "backward")


REQUIRED = {
    "dropped element": (3, 3, 6),
    "vector tail": (6, 6, 6),
    "unbiased variance normalizes": (3, 3, 6),
    "partial sums through 16 bit": (1, 1, 2),
    "epsilon outside the root": (0, 6, 6),
    "epsilon missing": (0, 6, 6),
    "epsilon 1e-3": (6, 6, 6),
    "variance as inverse": (6, 6, 6),
    "dx without mean(dy)": (6, 6, 6),
    "dx without projection": (6, 6, 6),
    "dscale and dbias through 16 bit": (5, 6, 1),
}
"""The times that a bug must be found on each class of data, of six settings; by all together, as often as by the best.

Measured with this bound when it was derived, on another set of simulated kernels with the same bugs."""
CORRECT = ("two_pass", "folded", "sequential", "welford")
"""Styles of kernels that must pass everywhere."""


@dataclasses.dataclass
class Found:
    """A kernel and where it was objected to."""

    kernel: str
    """The bug, or the style of a correct kernel."""
    correct: bool
    required: dict[str, int]
    """Least number of settings by class of data, and "together"; of a correct kernel the most, which is 0."""
    found: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Settings by class of data, such as "bf16 m=12544"."""

    @property
    def counts(self) -> dict[str, int]:
        """Settings found in, by class of data and "together"."""
        counts = {fill: len(settings) for fill, settings in self.found.items()}
        return counts | {"together": len({s for settings in self.found.values() for s in settings})}

    @property
    def good(self) -> bool:
        """No false alarm; a bug found as often as required."""
        counts = self.counts
        return all(counts[c] == 0 if self.correct else counts[c] >= least for c, least in self.required.items())


@dataclasses.dataclass
class Report:
    """Every kernel, and whether the judge did what is required of it."""

    settings: list[str]
    kernels: list[Found]
    seconds: float

    @property
    def good(self) -> bool:
        """No false alarm, and every bug found as often as required."""
        return all(kernel.good for kernel in self.kernels)

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values, with the counts."""
        kernels = [vars(k) | {"counts": k.counts, "good": k.good} for k in self.kernels]
        return {"settings": self.settings, "kernels": kernels, "seconds": self.seconds, "good": self.good}


def run(
    settings: Sequence[tuple[str, int]] = SETTINGS,
    required: Mapping[str, tuple[int, int, int]] = REQUIRED,
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> Report:
    """Judge every kernel in every setting.

    `settings`: among `SETTINGS`. With fewer than all of them a bug may be missed in as many settings as in the whole
    table. `progress`: called with a text, the steps done and the steps in all.
    """
    started = time.perf_counter()
    missing = len(SETTINGS) - len(settings)
    none = dict.fromkeys((*FILLS, "together"), 0)
    kernels = [Found(style, True, none) for style in CORRECT]
    for bug, counts in required.items():
        least = zip(none, (*counts, max(counts)), strict=True)
        kernels.append(Found(bug, False, {c: max(0, count - missing) for c, count in least}))
    sessions = [session(k.kernel) if k.correct else session(bug=k.kernel) for k in kernels]
    names = [f"{dtype} m={m}" for dtype, m in settings]
    steps = len(settings) * len(FILLS)
    for step, (setting, fill) in enumerate((s, f) for s in range(len(settings)) for f in FILLS):
        dtype, m = settings[setting]
        progress(f"{names[setting]}, {fill}", step, steps)
        cases = []
        for operation in OPERATIONS:
            problem = Problem.parse(f"{operation},spatial,{dtype},nchw,{SHAPES[m]},{FILLS[fill]}")
            inputs = generate(problem)
            cases.append((problem, inputs, expect(problem, inputs)))
        for kernel, simulated in zip(kernels, sessions, strict=True):
            places = kernel.found.setdefault(fill, [])
            alarms = set(Status) - {Status.PASS} if kernel.correct else {Status.FAIL, Status.WARN}
            if any(status in alarms for case in cases for status in _statuses(*case, simulated)):
                places.append(names[setting])
    return Report(names, kernels, time.perf_counter() - started)


def _statuses(problem: Problem, inputs: Inputs, expected: Expected, simulated: Session) -> Iterator[Status]:
    """Judge every output; those of the parameters' size come first, being quicker to judge."""
    outputs = execute(problem, inputs, simulated).outputs
    for name in sorted(outputs, key=lambda name: outputs[name].size):
        yield judge(expected, name, outputs[name]).status


def render(report: Report) -> str:
    """The report as a table: settings in which a kernel was objected to, and how many are required."""
    columns = [*FILLS, "together"]
    lines = [f"settings: {', '.join(report.settings)}", ""]
    lines.append(f"{'':<40}" + "".join(f"{c:>14}" for c in columns))
    for kernel in report.kernels:
        name = f"correct: {kernel.kernel}" if kernel.correct else kernel.kernel
        counts = kernel.counts
        limits = {c: "(none)" if kernel.correct else f"(>= {least})" for c, least in kernel.required.items()}
        cells = "".join(f"{f'{counts[c]} {limits[c]}':>14}" for c in columns)
        lines.append(f"{name:<40}{cells}{'' if kernel.good else '   FALSE ALARM' if kernel.correct else '   MISSED'}")
    lines += ["", f"{'as required' if report.good else 'NOT as required'}, in {report.seconds:.0f} s"]
    return "\n".join(lines)
