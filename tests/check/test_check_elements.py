"""Elements of y and dx that no statistics or sums explain together are wrong, however long the sums are."""

import numpy as np
import pytest
from judged_calls import made
from selftest_tool import rows
from selftest_tool.kernels import Kernel, bf16, f32
from tables import table

from pybnorm.check.judging import elements
from pybnorm.check.judging.bounds import Status, judge
from pybnorm.check.judging.whole_call import judge_call

TRAIN = "train,spatial,f32,nchw,8x16x56x56"  # m = 25,088
BACKWARD = "backward,spatial,f32,nchw,8x16x56x56"


def of_bits(a, bits):
    digits, exponent = np.frexp(a)
    return np.ldexp(np.round(digits * f32(2.0**bits)) / f32(2.0**bits), exponent)


def last_image(a, factor):
    a = a.copy()
    a[:, -a.shape[1] // 8 :] *= f32(factor)
    return a


def places_by_chance(a):
    return np.where(np.random.default_rng(1).random(a.shape) < 0.01, a * f32(1 + 5e-6), a)


CHANGES = {
    "17 bits": lambda a: of_bits(a, 17),
    "an image 5e-6 too large": lambda a: last_image(a, 1 + 5e-6),
    "a hundredth of them 5e-6 too large": places_by_chance,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", ["fill=randn", "fill=relu", "fill=randn,kappa=3"])
@pytest.mark.parametrize(("line", "name"), [(TRAIN, "y"), (BACKWARD, "dx")])
def test_elements_of_their_own_are_wrong_where_the_bound_has_room(line, name, options, change):
    expected, by_channel = made(f"{line},{options}")
    wrong = rows.outputs(Kernel(after={name: lambda a, _: CHANGES[change](a)}), by_channel)
    if options == "fill=randn":
        assert judge(expected, name, wrong[name]).status == Status.PASS
    verdicts = judge_call(expected, wrong)
    assert verdicts[name].status == Status.FAIL
    assert options != "fill=randn" or "apart from the others" in verdicts[name].note
    assert {v.status for n, v in verdicts.items() if n != name} <= {Status.PASS, Status.WARN}


@table("operation, name", [("train", "y"), ("backward", "dx")])
@table("fill", ["randn", "exact", "sparse", "relu", "image", "level", "randn,kappa=100"])
@table("style", rows.STYLES)
def test_no_right_kernel_is_beyond_half_of_it(operation, name, fill, style):
    expected, by_channel = made(f"{operation},spatial,f32,nchw,4x8x28x28,fill={fill}")
    assert elements.asked(expected, name)
    tally = elements.apart(expected, name, rows.outputs(rows.STYLES[style], by_channel)[name])[0]
    assert (tally.over, tally.ratio < 0.5) == (0, True), tally.ratio


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("operation", ["train", "backward"])
def test_nor_is_the_right_result_rounded(operation, dtype):
    expected, _ = made(f"{operation},spatial,{dtype},nchw,4x8x28x28,fill=randn,kappa=3")
    name = "y" if operation == "train" else "dx"
    right = expected.outputs[name].astype(expected.inputs.x.dtype)
    assert elements.apart(expected, name, right)[0].ratio < 0.6


def test_a_pass_says_how_fine_it_was_looked_at():
    expected, by_channel = made(f"{TRAIN},fill=randn")
    outputs = rows.outputs(Kernel(), by_channel)
    assert judge_call(expected, outputs)["y"].noticed < 2e-6 < judge(expected, "y", outputs["y"]).noticed


@pytest.mark.parametrize(
    "line",
    [
        "train,spatial,f32,nchw,4x4x3x5",  # sums of fewer than 64 terms
        f"{TRAIN},alpha=2",
        f"{TRAIN},activation=relu",
        f"{BACKWARD},saved=0",  # 1/sigma is rounded, too
        "infer,spatial,f32,nchw,8x16x56x56",
    ],
)
def test_what_is_not_asked(line):
    expected, _ = made(line)
    assert not any(elements.asked(expected, name) for name in ("y", "dx") if name in expected.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("line", [f"{BACKWARD},fill=randn", f"{BACKWARD},fill=randn,seed=3"])
def test_sums_of_dx_alone_are_held_against_their_roundings(line):
    expected, by_channel = made(line)
    short = {n: lambda a, _: a.astype(bf16).astype(f32) for n in ("centre", "slope")}
    verdicts = judge_call(expected, rows.outputs(Kernel(after=short), by_channel))
    assert {n: v.status for n, v in verdicts.items()} == {
        "dx": Status.FAIL,
        "dscale": Status.PASS,
        "dbias": Status.PASS,
    }


class _Other(Kernel):
    """y by another 1/sigma than the one that is saved."""

    def y(self, rows, mean, inverse):
        return super().y(rows, mean, inverse * f32(1 + 1e-5))


def test_exact_data_excuse_no_y_that_differs_from_what_was_saved():
    expected, by_channel = made(f"{TRAIN},fill=exact")
    verdicts = judge_call(expected, rows.outputs(_Other(), by_channel))
    assert {n for n, v in verdicts.items() if v.status == Status.FAIL} == {"y"}
