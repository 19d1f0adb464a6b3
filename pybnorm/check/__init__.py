"""Runs one batch-norm case on vendor libraries and on the float64 reference, and says who is wrong.

A case is a `Problem`, one line of text. Its inputs are a function of that line (`pybnorm.check.language.data`), its
verdict follows from a derived error bound (`pybnorm.check.judging.bounds`), and each library runs in processes of its
own (`pybnorm.check.run.worker`). `arguments` and `judge` are the judge for kernels that run elsewhere,
`pybnorm.check.run.implementations` says how a Python object is run as a library is.
"""

from pybnorm.check.judging.bounds import Point, Status, Verdict
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.judging.standalone import arguments, judge
from pybnorm.check.judging.which import Fit, which_convention
from pybnorm.check.language.lines import expand, read_suite
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import run_case
from pybnorm.check.run.worker import Worker

__all__ = [
    "CaseResult",
    "Fit",
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
    "which_convention",
]
