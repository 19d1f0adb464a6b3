"""One element that is dropped, doubled, swapped or moved is named in long sums of ordinary data; noise is not."""

import numpy as np
import pytest

from pybnorm.check import matched_filters
from pybnorm.check.activations import activate, passes
from pybnorm.check.bounds import Status, expect
from pybnorm.check.data import Inputs, generate
from pybnorm.check.matched_filters import hypotheses, matches
from pybnorm.check.problem import Problem
from pybnorm.check.runner import execute, run_case
from pybnorm.check.selftest.simulated import session
from pybnorm.check.verdicts import judge_call

f32 = np.float32
TRAIN = "train,spatial,f32,nchw,8x16x56x56,fill=randn"  # m = 25,088
BACKWARD = "backward,spatial,f32,nchw,8x16x56x56,fill=randn"


@pytest.fixture(scope="module")
def right():
    """Right results of both, computed in float32, with x and dy by channel."""

    def made(line):
        problem = Problem.parse(line)
        inputs = generate(problem)
        outputs = execute(problem, inputs, session()).outputs
        rows = {
            name: np.moveaxis(getattr(inputs, name), 1, 0).reshape(problem.dims[1], -1).astype(np.float64)
            for name in ("x", "dy")
            if getattr(inputs, name) is not None
        }
        return problem, expect(problem, inputs), outputs, rows

    return {line: made(line) for line in (TRAIN, BACKWARD)}


def like(array, values):
    return values.reshape(array.shape).astype(array.dtype)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: -s[:, -1], "the last element of every channel were left out"),
        (lambda s: -s[:, 0], "the first element of every channel were left out"),
        (lambda s: -s[:, -3:].sum(axis=1), "the last 3 elements of every channel were left out"),
        (lambda s: s[:, -1], "the last element of every channel were read twice"),
        (lambda s: -s[:, 12345], "element 12345 of every channel were left out"),
        (lambda s: s[:, 9999], "element 9999 of every channel were read twice"),
        (lambda s: s[:, -2] - s[:, -1], "the last element of every channel were not read and a neighbour twice"),
        (lambda s: s[:, 20001] - s[:, 20000], "element 20000 of every channel were not read"),
        (lambda s: -s[:, 3135::3136].sum(axis=1), "the last element of every image were left out"),
        (lambda s: -s.reshape(16, 8, -1)[:, :, :56].sum(axis=(1, 2)), "the first 56 elements of every image were left"),
        (lambda s: s[:, ::56].sum(axis=1), "the first element of every row were read twice"),
        (
            lambda s: (s[:, 3134::3136] - s[:, 3135::3136]).sum(axis=1),
            "the last element of every image were not read and a neighbour twice",
        ),
        (
            lambda s: (s[:, 3135::3136] - s[:, ::3136]).sum(axis=1),
            "the first element of every image were not read and the last one twice",
        ),
        (
            lambda s: -(s[:, ::3136] + s[:, 3135::3136]).sum(axis=1),
            "the first and last element of every image were left out",
        ),
        (lambda s: -s[:, 2047::2048].sum(axis=1), "the last element of every block of 2048 were left out"),
        (lambda s: -s[:, 8192:8224].sum(axis=1), "elements 8192 to 8223 of every channel were left out"),
        (lambda s: s[:, 20480:20484].sum(axis=1), "elements 20480 to 20483 of every channel were read twice"),
    ],
)
@pytest.mark.parametrize("output", ["saved_mean", "running_mean", "saved_inv_variance", "dbias", "dscale"])
def test_one_term_that_is_missing_is_named(right, change, text, output):
    """The sum alone is wrong, by as much as the term that is named."""
    line = TRAIN if output.startswith(("saved", "running")) else BACKWARD
    problem, expected, outputs, rows = right[line]
    m = problem.m
    mean, inverse = (a.ravel()[:, None] for a in expected.statistics)
    x_hat = (rows["x"] - mean) * inverse
    terms = {"dbias": rows.get("dy"), "dscale": rows["dy"] * x_hat} if line == BACKWARD else {"": rows["x"]}
    got = outputs[output].astype(np.float64).ravel()
    if output == "saved_inv_variance":
        variance = 1 / got**2 - problem.epsilon
        wrong = 1 / np.sqrt(variance + change((rows["x"] - mean) ** 2) / m + problem.epsilon)
    elif output == "saved_mean":
        wrong = got + change(terms[""]) / m
    elif output == "running_mean":
        wrong = got + problem.factor * change(terms[""]) / m
    else:
        wrong = got + change(terms[output])
    changed = outputs | {output: like(outputs[output], wrong)}
    verdicts = judge_call(expected, changed)
    assert verdicts[output].status == Status.FAIL, verdicts[output]
    assert text in verdicts[output].note
    assert {name for name, v in verdicts.items() if v.status != Status.PASS} == {output}


def test_a_small_image_that_is_missing_is_named():
    problem = Problem.parse("train,spatial,f32,nchw,512x16x7x7,fill=randn")
    inputs = generate(problem)
    expected = expect(problem, inputs)
    missing = inputs.x[37].astype(np.float64).sum(axis=(1, 2)) / problem.m
    got = expected.outputs["saved_mean"].ravel() - missing
    found = matches(expected, {"saved_mean": like(expected.outputs["saved_mean"], got).astype(f32)})["saved_mean"]
    assert found.bug == "elements 1813 to 1861 of every channel were left out"


def test_x_and_dy_that_part_by_one_element_are_named(right):
    problem, expected, outputs, rows = right[BACKWARD]
    mean, inverse = (a.ravel()[:, None] for a in expected.statistics)
    x_hat, dy = (rows["x"] - mean) * inverse, rows["dy"]
    for i in (problem.m - 2, 4711):
        moved = (dy[:, i] - dy[:, i + 1]) * (x_hat[:, i + 1] - x_hat[:, i])
        wrong = outputs | {"dscale": like(outputs["dscale"], outputs["dscale"].ravel() + moved)}
        verdict = judge_call(expected, wrong)["dscale"]
        assert verdict.status == Status.FAIL
        assert "were swapped with its neighbour in x alone" in verdict.note


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("style", ["two_pass", "welford"])
@pytest.mark.parametrize("line", ["train,spatial,{},nhwc,8x16x56x56", "backward,spatial,{},nchw,8x16x56x56,saved=0"])
def test_a_dropped_element_is_seen_in_every_output(dtype, style, line):
    """What is computed from a wrong sum is wrong with it; that one is right shows nothing."""
    problem = Problem.parse(line.format(dtype) + ",fill=randn")
    faulty = run_case(problem, session(style, "dropped element"))
    assert faulty.status == Status.FAIL
    passed = {v.output for v in faulty.verdicts if v.status != Status.FAIL}
    # 1/m of a standard deviation is a hundredth of bfloat16's ulp, and x has a few hundred values
    assert passed <= ({"y"} if dtype == "bf16" else set())
    clean = run_case(problem, session(style))
    assert clean.status == Status.PASS, clean


@pytest.mark.parametrize("fill", ["exact", "paired"])
@pytest.mark.parametrize("output", ["saved_mean", "running_mean", "y"])
@pytest.mark.parametrize("activation", ["", ",activation=clamp,residual=1"])
def test_a_factor_of_the_mean_is_named_on_exact_data(fill, output, activation):
    problem = Problem.parse(f"train,spatial,f32,nchw,8x16x56x56,fill={fill}{activation}")
    inputs = generate(problem)
    expected = expect(problem, inputs)
    mean, inverse = expected.statistics

    def made(mean):
        right = {name: expected.outputs[name] for name in ("saved_mean", "running_mean")}
        right["running_mean"] = right["running_mean"] + problem.factor * (mean - right["saved_mean"])
        right["saved_mean"] = mean
        y = (inputs.x - mean) * inverse * inputs.scale + inputs.bias
        right["y"] = activate(problem, y if inputs.z is None else y + inputs.z)
        return {output: right[output].astype(f32)}

    assert not matches(expected, made(mean))
    found = matches(expected, made(mean * (1 + 1e-4)))[output]
    assert found.bug.startswith("the mean were multiplied by 1.0")
    assert abs(found.slope - 1.0001) < 1e-6
    # alike in size, not in sign: what a recurrence may round
    assert not matches(expected, made(mean * (1 + 1e-4 * np.where(np.arange(16) % 3, 1, -1).reshape(mean.shape))))


@pytest.mark.parametrize("activation", ["relu", "clamp"])
def test_a_dropped_element_is_seen_behind_an_activation(activation):
    for operation in ("train", "backward"):
        line = f"{operation},spatial,f32,nchw,8x16x56x56,fill=randn,activation={activation},residual=1"
        problem = Problem.parse(line)
        inputs = generate(problem)
        expected = expect(problem, inputs)
        mean, inverse = expected.statistics
        if operation == "train":
            mean = mean - inputs.x[-1:, :, -1:, -1:] / problem.m
            wrong = activate(problem, (inputs.x - mean) * inverse * inputs.scale + inputs.bias + inputs.z)
            found = matches(expected, {"y": wrong.astype(f32)})["y"]
        else:
            last = np.where(passes(problem, inputs.y), inputs.dy, 0)[-1:, :, -1:, -1:]
            found = matches(expected, {"dbias": (expected.outputs["dbias"] - last).astype(f32)})["dbias"]
        assert found.bug == "the last element of every channel were left out"


def test_noise_is_not_taken_for_a_bug(monkeypatch, right):
    """Even with a level of 1 %, whatever the noise looks like: its size, its tails, one bias of all, whole terms."""
    monkeypatch.setattr(hypotheses, "LEVEL", 0.01)
    rng = np.random.default_rng(11)
    alarms = 0
    for line, output in ((TRAIN, "saved_mean"), (BACKWARD, "dscale")):
        problem, expected, outputs, _rows = right[line]
        unit = 1 / problem.m if output == "saved_mean" else 1.0
        deviation = 1 / expected.statistics[1].ravel() if output == "saved_mean" else 1.0
        for trial in range(20):
            noise = rng.standard_normal(16) * 10 ** rng.uniform(-0.5, 0.8)
            noise = [
                noise,
                noise / np.abs(rng.standard_normal(16)),
                noise[0] + 1e-3 * noise,
                noise - abs(noise[0]),
                rng.integers(-2, 3, 16),
            ][trial % 5]
            got = outputs[output].ravel() + noise * unit * deviation
            alarms += bool(matches(expected, {output: like(outputs[output], got)}))
    assert alarms <= 1


def test_channels_that_go_together_prove_nothing(right):
    """An image repeated in every channel gives every channel the same deviation: nothing is said of it."""
    problem, _expected, _outputs, _rows = right[TRAIN]
    inputs = generate(problem)
    inputs.x[...] = inputs.x[:, :1]
    expected = expect(problem, inputs)
    outputs = execute(problem, inputs, session()).outputs
    one = inputs.x[-1, 0, -1, -1]
    outputs["saved_mean"] = like(outputs["saved_mean"], outputs["saved_mean"].ravel() - one / problem.m)
    assert not matches(expected, outputs)
    assert isinstance(inputs, Inputs)


def test_the_probability_is_that_of_so_many_channels_agreeing(right):
    problem, expected, outputs, rows = right[TRAIN]
    got = outputs["saved_mean"].ravel() - rows["x"][:, -1] / problem.m
    found = matches(expected, {"saved_mean": like(outputs["saved_mean"], got)})["saved_mean"]
    assert found.probability < matched_filters.LEVEL
    assert abs(found.slope - 1) < 0.01
    # half of the channels without the bug: no longer an explanation
    half = np.where(np.arange(16) % 2, got, outputs["saved_mean"].ravel())
    assert not matches(expected, {"saved_mean": like(outputs["saved_mean"], half)})


def test_one_channel_with_a_large_element_does_not_hide_the_others(right):
    """What is cut off of the deviation is cut off of the prediction: the slope stays 1."""
    problem, _expected, _outputs, _rows = right[TRAIN]
    inputs = generate(problem)
    rows = np.moveaxis(inputs.x, 1, 0).reshape(16, -1)
    inputs.x[-1, 3, -1, -1] = rows[3].mean() + 20 * rows[3].std()
    expected = expect(problem, inputs)
    outputs = execute(problem, inputs, session(bug="dropped element")).outputs
    (found,) = matches(expected, {"saved_mean": outputs["saved_mean"]}).values()
    assert found.bug == "the last element of every channel were left out"
