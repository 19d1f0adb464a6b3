"""y written over x, and dx over dy: right where `Capability.IN_PLACE` is set, else refused before a call is made."""

import dataclasses

import pytest
from place import device_of
from tables import table
from test_calls import Case

import pybnorm
from pybnorm import Capability, Operation
from pybnorm.check.judging import bounds
from pybnorm.check.language import data
from pybnorm.check.language.calls import METHODS
from pybnorm.check.language.problem import Problem
from pybnorm.check.run import runner

WORDS = ("train", "infer", "backward")


def parsed(word, kind="spatial,f32,nchw", dims="4x3x5x6"):
    return Problem.parse(f"{word},{kind},{dims},fill=randn,inplace=1,algorithm=plain")


def pair(problem):
    return ("dy", "dx") if problem.operation == Operation.BACKWARD else ("x", "y")


def wrong(handle, problem):
    """Outputs of the call that are not within the bound."""
    inputs = data.generate(problem)
    seen = runner.execute(problem, inputs, runner.Session(handle.backend, handle, device_of(handle)))
    expected = bounds.expect(problem, inputs)
    verdicts = {name: bounds.judge(expected, name, seen.outputs[name]) for name in expected.outputs}
    return seen.damage, {name: str(v) for name, v in verdicts.items() if v.status != bounds.Status.PASS}


@table("layout", ["nchw", "nhwc"])
@table("dtype", ["f32", "f16"])
@table("mode", ["spatial", "peract"])
@table("word", WORDS)
def test_what_is_written_over_its_input_is_right_or_refused(handle, word, mode, dtype, layout):
    problem = parsed(word, f"{mode},{dtype},{layout}")
    source, target = pair(problem)
    bits, _ = pybnorm.capability(
        handle.backend, problem.operation, problem.mode, problem.dtype, problem.layout, len(problem.dims)
    )
    if not bits:
        pytest.skip(f"{handle.backend} has no such call")
    call = pybnorm.defects.Call(
        problem.operation, problem.mode, problem.dtype, problem.dims, problem.layout, inplace=True
    )
    refused = [d.id for d in pybnorm.known_defects(handle.backend, call, handle.library.version) if d.refused]
    if refused:
        with pytest.raises(pybnorm.UnsupportedError, match=f"{target} may not be {source} here: .*{refused[0]}"):
            wrong(handle, problem)
    elif Capability.IN_PLACE in bits:
        for _ in range(2):  # the second call knows from the first that it may
            assert wrong(handle, problem) == ([], {})
    else:
        case = Case(handle, dataclasses.replace(problem, inplace=False))
        case.made[target] = case.given[source]
        with pytest.raises(pybnorm.ArgumentError, match=f"memory that overlaps {source}"):
            case.run_plan()
        case.unchanged(case.given)


@pytest.mark.parametrize("word", WORDS)
def test_only_the_whole_input_and_without_a_prior(handle, word):
    problem = dataclasses.replace(parsed(word), inplace=False)
    source, target = pair(problem)
    case = Case(handle, dataclasses.replace(problem, beta=0.5))
    case.made[target] = case.given[source]
    with pytest.raises(pybnorm.ArgumentError, match=f"memory that overlaps {source}"):
        case.run_plan()
    method, arrays = getattr(handle, METHODS[problem.operation]), {**case.given, **case.made}
    arrays[target] = arrays[source]._replace(pointer=arrays[source].pointer + 4)
    with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
        method(**arrays)
    if word == "backward":
        with pytest.raises(pybnorm.ArgumentError, match="overlaps"):
            method(**arrays | {"dx": arrays["x"]})
    case.unchanged(case.given)


def test_a_kernel_that_keeps_sums_in_its_output_is_refused_by_name(need_device):
    need_device("miopen")
    with pybnorm.Handle("miopen", known_defects="ignore") as handle:
        problem = parsed("train", dims="769x2x1x160")
        case = Case(handle, dataclasses.replace(problem, inplace=False))
        case.run_plan()
        case.device.synchronize()
        over = Case(handle, dataclasses.replace(problem, inplace=False))
        over.made["y"] = over.given["x"]
        for _ in range(2):
            with pytest.raises(pybnorm.UnsupportedError, match="y may not be x here: known defect miopen-in-place"):
                over.run_plan()
        over.unchanged([name for name in over.before if name != "y"])
        assert wrong(handle, parsed("infer", dims="769x2x1x160")) == ([], {})
