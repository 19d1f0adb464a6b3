"""Runs one batch-norm case on vendor libraries and on the float64 reference, and says who is wrong.

A case is a `Problem`, one line of text. Its inputs are a function of that line (`pybnorm.check.data`), its verdict
follows from a derived error bound (`pybnorm.check.bounds`), and each library runs in processes of its own
(`pybnorm.check.worker`). `arguments` and `judge` are the judge for kernels that run elsewhere,
`pybnorm.check.implementations` says how a Python object is run as a library is.
"""

from pybnorm.check.bounds import Point, Status, Verdict
from pybnorm.check.judging import arguments, judge
from pybnorm.check.problem import Problem, expand, read_suite
from pybnorm.check.results import CaseResult
from pybnorm.check.runner import run_case
from pybnorm.check.worker import Worker

__all__ = [
    "CaseResult",
    "Point",
    "Problem",
    "Status",
    "Verdict",
    "Worker",
    "arguments",
    "expand",
    "judge",
    "read_suite",
    "run_case",
]
