"""A case's correct results and arrays, and the verdicts on a kernel of `selftest_tool.rows`."""

import functools

from selftest_tool import rows

from pybnorm.check.judging.bounds import expect
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.check.run.runner import execute
from pybnorm.check.selftest.simulated import session


def case(line):
    """A problem, its data, and what is correct of it."""
    problem = Problem.parse(line) if isinstance(line, str) else line
    inputs = generate(problem)
    return problem, inputs, expect(problem, inputs)


@functools.lru_cache(2)
def _made(line):
    problem, inputs, expected = case(line)
    return expected, rows.Rows(problem, inputs)


def made(line):
    """What is correct of a case, and its arrays by channel, which nobody changes: the last two are kept."""
    return _made.__wrapped__(line) if "data=" in str(line) else _made(line)


def outputs_of(line, style="two_pass", bug=None, kernels=None):
    """A case with what a simulated kernel makes of it."""
    problem, inputs, expected = case(line)
    return problem, inputs, expected, execute(problem, inputs, kernels or session(style, bug)).outputs


def judged(line, kernel, record=None):
    """The verdict on each output of a kernel."""
    expected, by_channel = made(line)
    return judge_call(expected, rows.outputs(kernel, by_channel), record)
