"""The verdicts on a whole call: what its outputs say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from pybnorm.check.bounds import Expected, Status, Verdict, judge
from pybnorm.check.matched_filters import matches

__all__ = ["judge_call"]

Array = npt.NDArray[Any]


def judge_call(expected: Expected, outputs: Mapping[str, Array]) -> dict[str, Verdict]:
    """The verdict on every output of a call.

    Each output is held against its bound (`pybnorm.check.bounds.judge`), and all of them against the bugs whose
    deviations can be predicted (`pybnorm.check.matched_filters`).

    Parameters
    ----------
    expected : Expected
    outputs : mapping of str to ndarray
        What the library wrote, as stored, in logical order; the keys are those of ``expected.outputs``.
    """
    verdicts = {name: judge(expected, name, outputs[name]) for name in expected.outputs}
    for name, match in matches(expected, outputs).items():
        verdict = verdicts[name]
        verdict.status = Status.FAIL
        verdict.note = "; ".join(filter(None, [str(match), verdict.note]))
    return verdicts
