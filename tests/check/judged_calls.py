"""A case's correct results and arrays, and the verdicts on a kernel of `selftest_tool.rows`."""

from selftest_tool import rows

from pybnorm.check.judging.bounds import expect
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem


def made(line):
    """What is correct of a case, and its arrays by channel."""
    problem = Problem.parse(line) if isinstance(line, str) else line
    inputs = generate(problem)
    return expect(problem, inputs), rows.Rows(problem, inputs)


def judged(line, kernel, record=None):
    """The verdict on each output of a kernel."""
    expected, by_channel = made(line)
    return judge_call(expected, rows.outputs(kernel, by_channel), record)
