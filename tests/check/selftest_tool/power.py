"""What the judge sees at every length of a sum: each bug in each output that it reaches, and no honest kernel accused.

A setting is an operation, m, a dtype and a class of data. A bug (`selftest_tool.rows`) reaches an output where
its bits differ from those of the same kernel without it; there the output must be FAIL. That is required

* of elements that are dropped, doubled, swapped or read from beside them, and of 16-bit results that are not rounded
  to nearest, on exact data, and on random data in sums of up to `SEEN` terms,
* of elements apart from the others of their statistic, where these are asked
  (`pybnorm.check.judging.elements`),
* of everything else on exact data; on random data long sums may be as far off by rounding as by most of these, which is
  counted and required of nobody.

An effect of no more than `VISIBLE` times what one division and one store may round cannot be seen, and is listed so;
nor can one, on exact data, that Welford's recurrence may have where it was right in all channels but for a chance. No
honest kernel may be FAIL or MISTRUSTED, and but for the one-pass kernel none may be WARN. One float32 chain may
be CHAIN.
"""

import collections
import contextlib
import dataclasses
import time
from unittest import mock

import numpy as np
from judged_calls import made

from pybnorm.check.judging import whole_call
from pybnorm.check.judging.bounds import Status, Tier, expect, judging
from pybnorm.check.judging.deviations import measured
from pybnorm.check.judging.elements import asked
from pybnorm.check.judging.roundings import EXPLAINED
from pybnorm.check.judging.whole_call import Record, counted, judge_call, scatter_of
from pybnorm.check.language.data import sums_are_exact
from pybnorm.check.language.problem import DATA_OUTPUTS, Problem
from pybnorm.enums import DataType
from selftest_tool import rows

SHAPES = {
    64: "4x16x4x4",
    3136: "16x16x14x14",
    25088: "8x16x56x56",
    100352: "32x16x56x56",
    401408: "32x16x112x112",
    1000000: "4x16x500x500",
}
"""Dims by m; sixteen channels."""
CHANNELS = 16
VISIBLE = 3.0
SEEN = 100352
"""Terms of a random sum up to which an element that is missing must show; in longer ones a variance hides it."""
_LEAST = Tier("least", False, 1.0, exact=True)
"""What may be rounded after the sums."""
_WORDS = (" dropped", " twice", " swapped in dscale", " from beside it")
ELEMENTS = frozenset(
    name
    for name in rows.BUGS
    if ("element" in name and any(w in name for w in _WORDS)) or name.startswith("x of ") or "16-bit results" in name
)
"""Bugs that are required on random data, too, in sums of up to `SEEN` terms."""
TOGETHER = frozenset({"results of 17 bits", "last quarter of the results 5e-6 too large"})
"""Bugs of elements apart from the others, which float32 results of long sums show on every class of data."""
_ANYWHERE = frozenset(
    n for n in ELEMENTS if any(word in n for word in ("in the middle", "of one warp", "of each block"))
)
"""Those of elements that lie elsewhere in each rank's share."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the kernels compute."""

    operation: str
    m: int
    fill: str
    dtype: str = "f32"
    options: str = ""
    """Of the problem, such as an activation."""

    @property
    def problem(self):
        """The problem of it."""
        if self.operation == "gather_stats":
            return Problem.parse(f"gather_stats,spatial,{self.dtype},nchw,{self.m}x{CHANNELS},fill={self.fill}")
        blends = self.m == min(SHAPES) and self.operation != "backward_reduce" and not self.options
        blend = ",alpha=2,beta=0.5" if blends else ""
        return Problem.parse(
            f"{self.operation},spatial,{self.dtype},nchw,{SHAPES[self.m]},fill={self.fill}{blend}{self._more}"
        )

    @property
    def _more(self):
        return f",{self.options}" if self.options else ""

    def __str__(self):
        return f"{self.operation} m={self.m} {self.dtype} {self.fill}{self._more}"


def _settings(
    lengths,
    dtypes=("f32",),
    operations=("train", "backward", "infer"),
):
    return tuple(
        Setting(operation, m, fill, dtype)
        for m in lengths
        for dtype in dtypes
        for fill in ("exact", "randn")
        for operation in operations
    )


_COMPOSED = ("frozen", "training_grad", "backward_reduce", "backward_elemt", "elemt", "sync_train", "sync_backward")
SHORT = ("f16", "bf16")


def _activated(lengths):
    """Each operation with an activation, masked by forward's result and by one that is made again."""
    return tuple(
        Setting(operation, m, fill, options=f"activation={activation}")
        for m in lengths
        for fill in ("exact", "randn")
        for operation, activation in (
            ("train", "clipped_relu"),
            ("train", "clamp,residual=1"),
            ("infer", "clamp,residual=1"),
            ("backward", "clamp"),
            ("backward", "clipped_relu,residual=1"),
        )
    )


QUICK = (
    *_settings((64, 3136)),
    *_settings((64,), SHORT),
    *(s for s in _settings((25088,)) if s.operation != "infer"),
    *_settings((64,), operations=_COMPOSED),
    *_activated((64,)),
    Setting("gather_stats", 64, "randn"),
)
"""Some minutes."""
WHOLE = (
    *_settings(SHAPES),
    *_settings((64, 3136, 100352), SHORT),
    *_settings((64, 3136, 100352), ("f32", *SHORT), _COMPOSED),
    *_activated((64, 3136, 100352)),
    Setting("gather_stats", 64, "randn"),
)
"""Half an hour."""


class Report:
    """What was found."""

    def __init__(self, settings):
        self.settings, self.alarms, self.judged, self.started = settings, [], 0, time.perf_counter()
        self.found, self.missed, self.hidden = (collections.defaultdict(list) for _ in range(3))
        """By bug: (setting, output) that were FAIL, that had to be and were not, and in which it cannot be seen."""

    @property
    def good(self):
        return not self.missed and not self.alarms


def run(settings=QUICK, bugs=rows.BUGS, styles=rows.STYLES):
    """Judge every style and every bug in every setting."""
    report = Report([str(s) for s in settings])
    for setting in settings:
        with _statuses_only():
            _one(report, setting, bugs, styles)
    return report


@contextlib.contextmanager
def _statuses_only():
    """Leave out what names conventions and places: most of the time of a FAIL, and no status depends on it."""
    nothing = {"convention_of": lambda *_: None}, {"put": lambda *_: None}
    with mock.patch.multiple(whole_call, **nothing[0]), mock.patch.multiple(judging, **nothing[1]):
        yield


def _one(report, setting, bugs, styles):
    """Each style and each bug in one setting."""
    expected, by_channel = made(setting.problem)
    for style, kernel in styles.items():
        verdicts = judge_call(expected, rows.outputs(kernel, by_channel))
        report.judged += len(verdicts)
        allowed = [Status.PASS]
        allowed += [Status.WARN] if style == "one pass" else [Status.CHAIN] if style in rows.ONE_CHAIN else []
        wrong = [v for v in verdicts.values() if v.status not in allowed]
        report.alarms += [f"{setting}: {style}: {v.output} {v.status.value}: {v.note}" for v in wrong]
    right = rows.outputs(rows.Kernel(), by_channel)
    for bug in bugs:
        _look(report, setting, bug, expected, by_channel, right)


def _look(report, setting, bug, expected, by_channel, right):
    """Enter what the judge says of one bug."""
    got = rows.outputs(rows.BUGS[bug], by_channel)
    reached = [name for name in got if got[name].tobytes() != right[name].tobytes()]
    if not reached:
        return
    record, recurrence = Record(), counted(scatter_of(CHANNELS, 2.0), setting.m)
    verdicts = judge_call(expected, got, record)
    exact = sums_are_exact(expected.problem)

    def enter(where, text):
        where[bug].append((str(setting), text))

    for name in reached:
        if verdicts[name].status == Status.FAIL:
            enter(report.found, name)
        elif _effect(expected, name, got[name], right[name]) <= VISIBLE:
            enter(report.hidden, f"{name}: no more than roundings of the result")
        elif bug in TOGETHER and expected.problem.dtype == DataType.FLOAT32 and asked(expected, name):
            enter(report.missed, f"{name}: {verdicts[name].status.value}")
        elif not exact and (bug not in ELEMENTS or setting.m > SEEN):
            enter(report.hidden, f"{name}: no more than the roundings of {setting.m} terms")
        elif not exact and setting.operation.startswith("sync") and bug in _ANYWHERE:
            enter(report.hidden, f"{name}: the places of the ranks are foretold together at their ends only")
        elif exact and _effect(expected, name, got[name], right[name], recurrence) <= 1:
            enter(report.hidden, f"{name}: no more than Welford's recurrence rounds in {CHANNELS} channels")
        elif exact and expected.problem.takes_variance and verdicts[name].status == Status.PASS:
            enter(report.hidden, f"{name}: no more than the roundings of terms whose 1/sigma is not exact")
        elif not exact and (share := _left_by_store(expected, bug, name, got)) < EXPLAINED:
            enter(report.hidden, f"{name}: 16-bit results keep {100 * share:.0f} % of what its sums are off by")
        else:
            enter(report.missed, f"{name}: {verdicts[name].status.value}")


def _left_by_store(expected, bug, name, got):
    """Share of the deviation that a 16-bit y or dx shows that is the kernel's own; of the sum that shows most.

    A bug whose prediction is right to the last digit explains no more of it.
    """
    problem, inputs = expected.problem, expected.inputs
    if name not in DATA_OUTPUTS or problem.dtype.itemsize != 2:
        return 1.0
    wide = {n: a.astype(np.float32) for n in ("x", "dy", "prior") if (a := getattr(inputs, n)) is not None}
    plain, same = dataclasses.replace(problem, dtype=DataType.FLOAT32), dataclasses.replace(inputs, **wide)
    own = measured(expect(plain, same), name, rows.outputs(rows.BUGS[bug], rows.Rows(plain, same))[name])
    shown = measured(expected, name, got[name])
    shares = [1 - float(np.sum((shown[s] - own[s]) ** 2)) / max(float(np.sum(shown[s] ** 2)), 1e-300) for s in shown]
    return max(shares, default=1.0)


def _effect(expected, name, got, right, least=_LEAST):
    """Largest change by a bug, in units of the bound of `least`."""
    worst = 0.0
    with np.errstate(all="ignore"):
        for part in expected.parts(name, got, (least,)):
            assert part.got is not None
            plain = right.reshape(expected.shape(name))[part.index].astype(np.float64)
            worst = max(worst, float(np.nanmax(np.abs(part.got - plain) / part.classes[0][0])))
    return worst


def render(report):
    """The report as a table: of each bug, the outputs in which it was seen, in which not, and why."""
    lines = [f"{len(report.settings)} settings", f"{'bug':<58}{'outputs seen':>14}{'missed':>8}{'cannot be seen':>16}"]
    for bug in rows.BUGS:
        counts = [len(where.get(bug, ())) for where in (report.found, report.missed, report.hidden)]
        lines.append(f"{bug:<58}{counts[0]:>14}{counts[1]:>8}{counts[2]:>16}")
    for word, where in (("cannot be seen", report.hidden), ("MISSED", report.missed)):
        lines += [f"{word} {bug}: {setting}: {text}" for bug, places in where.items() for setting, text in places]
    lines += [f"FALSE ALARM {text}" for text in report.alarms]
    verdict = "as required" if report.good else "NOT as required"
    lines.append(
        f"{len(rows.BUGS)} bugs, {len(rows.STYLES)} honest styles of kernels ({report.judged} outputs judged, "
        f"{len(report.alarms)} objected to): {verdict}, in {time.perf_counter() - report.started:.0f} s"
    )
    return "\n".join(lines)
