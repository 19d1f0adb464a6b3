"""`unbiased=False`: the running variance takes the biased variance, by every algorithm, call and plan."""

import numpy as np
import pytest

import pybnorm
from pybnorm import ArgumentError, ArgumentTypeError, reference

DIMS = (3, 5, 4, 2)
STATISTICS = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")


def values(factor):
    rng = np.random.default_rng(3)
    made = {"x": rng.normal(2, 3, DIMS), "scale": rng.uniform(1, 2, DIMS[1]), "bias": rng.uniform(-1, 1, DIMS[1])}
    made |= {"running_mean": rng.normal(size=DIMS[1]), "running_variance": rng.uniform(1, 2, DIMS[1])}
    if factor == 1:  # which replaces them unread
        made |= {name: np.full(DIMS[1], np.nan) for name in made if name.startswith("running")}
    return {name: array.astype(np.float32) for name, array in made.items()}


def hold(given, got, factor):
    """`got` has results by name; a correction by m / (m - 1) would be 4e-2 of the variance."""
    double = {name: array.astype(np.float64) for name, array in given.items()}
    right = reference.forward_training(**double, unbiased=False, exponential_average_factor=factor)
    for name, array in got.items():
        np.testing.assert_allclose(array.reshape(-1), getattr(right, name).reshape(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 0.25, 1.0])
def test_calls_and_plans(bench, factor):
    handle, given = bench.handle, values(factor)
    if factor == 1 and handle.backend != "onednn":  # which alone does not read the mean: 0 * NaN would stay
        finite = STATISTICS[:1] if handle.backend == "cudnn" else STATISTICS[:2]
        given |= {name: np.ones_like(given[name]) for name in finite}
    for algorithm in (None, "auto", *pybnorm.algorithms(handle.backend)):
        placed = bench.put(given)
        y, saved = bench.put({"y": np.zeros_like(given["x"])})["y"], [np.full(DIMS[1], 7, np.float32)] * 2
        statistics = {n: placed[n] for n in STATISTICS[:2]} | bench.put(dict(zip(STATISTICS[2:], saved, strict=True)))
        options = {"exponential_average_factor": factor, "unbiased": False, "algorithm": algorithm}
        try:
            plan = handle.plan_forward_training(placed["x"], **options)
        except pybnorm.UnsupportedError:
            assert algorithm not in (None, "auto")
            continue
        assert ("biased" in plan.reason) == (factor != 0)
        size = handle.workspace_size("train", handle.descriptor(placed["x"]), unbiased=False, algorithm=algorithm)
        assert size >= plan.workspace_size
        for call in (plan, handle.forward_training):
            for name in STATISTICS[:2]:
                bench.device.refill(placed[name], given[name].view(np.uint8))
            buffer, address = bench.memory(size)
            chosen = {"workspace": (address, size) if size else None} | ({} if call is plan else options)
            call(*(placed[n] for n in ("x", "scale", "bias")), y, **statistics, **chosen)
            assert bench.intact(buffer, address, size)
            hold(given, {n: bench.device.to_numpy(a) for n, a in (statistics | {"y": y}).items()}, factor)
            assert np.array_equal(bench.device.to_numpy(placed["scale"]), given["scale"])


def test_a_device_needs_the_workspace_and_the_cpu_lends_it(bench):
    given = bench.put(values(0.25))
    plan = bench.handle.plan_forward_training(given["x"], unbiased=False, saved=False)
    y = bench.put({"y": np.zeros(DIMS, np.float32)})["y"]
    if plan.workspace_size and bench.handle.library.device_type != 1:
        with pytest.raises(pybnorm.WorkspaceError):
            plan(**given, y=y)
    else:
        plan(**given, y=y)
        hold(values(0.25), {n: bench.device.to_numpy(given[n]) for n in STATISTICS[:2]}, 0.1)


def test_bad_values(bench):
    x = bench.put(values(0.0))["x"]
    with pytest.raises(ArgumentTypeError, match="unbiased"):
        bench.handle.plan_forward_training(x, unbiased="no")
    single = x._replace(dims=(1, 5, 1, 1), strides=(5, 1, 1, 1))
    with pytest.raises(ArgumentError, match="element"):
        bench.handle.plan_forward_training(single, unbiased=False)
