"""The layer that keeps its statistics: judged step by step, saved, and restored elsewhere."""

import base64
import contextlib
import dataclasses
import json
import weakref

import numpy as np
import pytest
from layer_cases import DTYPES, LAYOUTS, MODES, SHAPE, Place, executes, hold, problem_of
from tables import table

import pybnorm
from pybnorm import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    DataType,
    Layout,
    Mode,
    Operation,
    UnsupportedError,
    devices,
)
from pybnorm.check.language import data
from pybnorm.layer import BatchNorm, BiasScaleProperties, Info
from pybnorm.miopen import cumulative_average_factor

TRAIN, INFER, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD
STATE = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")


@pytest.fixture
def place(handle):
    return Place(handle)


@pytest.fixture
def own_right(right):
    """Another such handle: a place gives it a stream, which ends with the test."""
    with pybnorm.Handle(right.backend, known_defects=right.known_defects) as opened:
        yield opened


@pytest.fixture(scope="module", params=pybnorm.backends())
def other(request):
    """A second handle, of each backend that executes; `handle` holds what a runner must have."""
    try:
        opened = pybnorm.Handle(request.param)
    except (pybnorm.LibraryError, pybnorm.NotInitializedError) as error:
        pytest.skip(f"{request.param} does not execute here: {str(error).splitlines()[0]}")
    with opened:
        yield opened


def make(place, mode=Mode.SPATIAL, **options):
    constructor = {
        Mode.SPATIAL: BatchNorm.spatial,
        Mode.PER_ACTIVATION: BatchNorm.per_activation,
        Mode.SPATIAL_PERSISTENT: BatchNorm.spatial_persistent,
    }[mode]
    return constructor(place.handle, device=place.device, **options)


def staged(place, mode=Mode.SPATIAL, dtype=DataType.FLOAT32, dims=SHAPE, **options):
    layer = make(place, mode, **options)
    layer.stage(place.put(np.empty(dims, data.numpy_dtype(dtype))))
    return layer


def forward(place, layer, problem, **options):
    """The plain call, to be refused."""
    inputs = data.generate(problem)
    x, y = (place.put(array, problem.strides) for array in (inputs.x, inputs.prior))
    call = layer.forward_training if problem.operation == TRAIN else layer.forward_inference
    call(x, place.put(inputs.scale), place.put(inputs.bias), y, **options)


def judged(place, layer, problem, **changes):
    """One judged call; running statistics before it, or saved ones, are the layer's own."""
    before = layer.info()
    own = {"mean": before.running_mean, "variance": before.running_variance}
    if problem.operation == BACKWARD:
        own = {name: getattr(before, name) for name in ("saved_mean", "saved_inv_variance")}
    inputs = dataclasses.replace(data.generate(problem), **own, **changes)
    x, result = (place.put(array, problem.strides) for array in (inputs.x, inputs.prior))
    names, outputs = ["alpha", "beta"], {"y": result}
    if problem.operation == BACKWARD:
        names += ["alpha_param", "beta_param"]
        outputs = {"dx": result, "dscale": place.put(inputs.prior_scale), "dbias": place.put(inputs.prior_bias)}
        arrays = {"x": x, "dy": place.put(inputs.dy, problem.strides), "scale": place.put(inputs.scale), **outputs}
    else:
        arrays = {"x": x, "scale": place.put(inputs.scale), "bias": place.put(inputs.bias), **outputs}
    options = {name: getattr(problem, name) for name in names}
    call = {TRAIN: layer.forward_training, INFER: layer.forward_inference, BACKWARD: layer.backward_prop}
    biased = {} if problem.unbiased else {"unbiased": False}
    if problem.operation == TRAIN:
        options |= {"exponential_average_factor": problem.factor, "epsilon": problem.epsilon, **biased}
    call[problem.operation](**arrays, **options, workspace=place.workspace(problem, layer, **biased))
    after, found = layer.info(), {name: place.get(array) for name, array in outputs.items()}
    if problem.operation == TRAIN:
        found |= {name: getattr(after, name) for name in STATE}
    else:
        assert after == before
    hold(place.handle, problem, inputs, found)
    return inputs


# ---------------------------------------------------------------- the calls


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda v: v.short)
@pytest.mark.parametrize("mode", Mode, ids=lambda v: v.name)
def test_steps_are_the_references(own_right, mode, dtype, layout):
    right, place = own_right, Place(own_right)
    common = {"mode": mode, "dtype": dtype, "layout": layout}
    avoids = right.known_defects == "avoid" and executes(right, mode, dtype, Layout.CHANNELS_FIRST)  # can be staged
    can = {o: avoids or executes(right, mode, dtype, layout, (o,)) for o in (TRAIN, INFER, BACKWARD)}
    if not can[TRAIN]:
        with pytest.raises(UnsupportedError):
            forward(place, staged(place, mode, dtype), problem_of(TRAIN, **common))
        return
    with staged(place, mode, dtype) as layer:
        assert layer.mode == mode
        for step in range(2):
            judged(place, layer, problem_of(TRAIN, **common, seed=step, factor=0.25, eps=2e-3, unbiased=step == 0))
        # Another batch size and blending; N is not part of what was staged.
        wide = common | {"dims": (7, *SHAPE[1:])}
        blended = problem_of(TRAIN, **wide, seed=5, factor=0.6, alpha=2.0, beta=0.5)
        trained = judged(place, layer, blended)
        for options in ({"seed": 6}, {"seed": 7, "alpha": -1.5, "beta": 0.25}):
            problem = problem_of(INFER, **common, eps=blended.epsilon, **options)
            if can[INFER]:
                judged(place, layer, problem)
            else:
                with pytest.raises(UnsupportedError):
                    forward(place, layer, problem)
        problem = problem_of(BACKWARD, **wide, alpha=0.5, beta=2.0, alpha_param=3.0, beta_param=-1.0)
        judged(place, layer, problem, x=trained.x, scale=trained.scale)


@pytest.mark.parametrize("start", [1.0, 0.0, 2.5])
def test_inference_before_training_divides_by_the_start(place, start):
    # At 0, gocudnn's start, the divisor is sqrt(epsilon); at 1, ours, x stays as it is but for epsilon.
    options = {} if start == 1.0 else {"initial_running_variance": start}
    with staged(place, epsilon=0.25, **options) as layer:
        info = layer.info()
        assert np.all(info.running_mean == 0)
        assert np.all(info.running_variance == start)
        assert not np.any(info.saved_mean)
        assert not np.any(info.saved_inv_variance)
        x = data.generate(problem_of(INFER)).x
        y = place.put(np.full_like(x, np.nan))
        one, zero = np.ones(SHAPE[1], np.float32), np.zeros(SHAPE[1], np.float32)
        layer.forward_inference(place.put(x), place.put(one), place.put(zero), y)
        right = x.astype(np.float64) / np.sqrt(start + 0.25)
        assert np.all(np.abs(place.get(y) - right) <= 8 * 2.0**-24 * np.abs(right))


def test_nan_stays_in_its_channel(place):
    x = data.generate(problem_of(TRAIN)).x.copy()
    x[1, 2, 3, 4] = np.nan
    with staged(place) as layer:
        y = place.put(np.zeros_like(x))
        ones = place.put(np.ones(SHAPE[1], np.float32))
        layer.forward_training(place.put(x), ones, place.put(np.zeros(SHAPE[1], np.float32)), y)
        got, info = place.get(y), layer.info()
    assert info.nan_policy == "propagate"
    assert np.isnan(got[:, 2]).all()
    assert np.isfinite(got[:, :2]).all()
    for name in STATE:
        assert np.array_equal(np.isnan(getattr(info, name)).reshape(-1), [False, False, True]), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize("described", [False, True])
def test_bias_scale_properties_are_the_derived_ones(place, mode, layout, described):
    problem = problem_of(TRAIN, mode, DataType.BFLOAT16, layout)
    x = place.put(np.empty(SHAPE, data.numpy_dtype(problem.dtype)), problem.strides)
    if described:
        x = pybnorm.TensorDescriptor(place.handle.backend, problem.dtype, SHAPE, problem.strides)
    with make(place, mode) as layer:
        layer.stage(x)
        dims = (1, *SHAPE[1:]) if mode == Mode.PER_ACTIVATION else (1, SHAPE[1], 1, 1)
        expected = BiasScaleProperties(Layout.CHANNELS_FIRST, DataType.FLOAT32, dims)
        assert layer.bias_scale_properties() == expected
        assert layer.running_mean.dims == layer.saved_inv_variance.dims == dims
        info = layer.info()
        assert (info.format, info.data_type, info.dims) == expected
        assert info.strides == pybnorm.TensorDescriptor(place.handle.backend, "f32", dims).strides


# ---------------------------------------------------------------- info, JSON, restore


def test_info_holds_what_the_last_training_used(place):
    with staged(place, epsilon=0.5, exponential_average_factor=0.75) as layer:
        before = layer.info()
        assert (before.epsilon, before.exponential_average_factor) == (0.5, 0.75)
        judged(place, layer, problem_of(TRAIN, factor=0.125, eps=0.0625))
        info = layer.info()
        assert (info.epsilon, info.exponential_average_factor) == (0.0625, 0.125)
        assert (info.mode, info.nan_policy) == (Mode.SPATIAL, "propagate")
        assert info != before
        inputs = data.generate(problem_of(TRAIN))
        arrays = [place.put(a) for a in (inputs.x, inputs.scale, inputs.bias, inputs.x)]
        with pytest.raises(ArgumentError, match=r"^alpha: "):
            layer.forward_training(*arrays, epsilon=0.25, exponential_average_factor=0.5, alpha=float("nan"))
        assert layer.info() == info  # a refused call leaves no trace
        layer.forward_training(*arrays)  # and without options the last ones hold
        again = layer.info()
        assert (again.epsilon, again.exponential_average_factor) == (0.0625, 0.125)
        assert again != info
    assert again.saved_mean.flags.writeable is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.epsilon = 1.0


@pytest.fixture
def info():
    """Values that decimal text, or a detour over another type, would not bring back."""
    bits = np.array([0x7FC12345, 0x00000001, 0x80000000, 0x7F800000, 0x3DCCCCCD, 0xFF7FFFFF], np.uint32)
    arrays = {name: np.roll(bits, i).view(np.float32).reshape(1, 6, 1, 1) for i, name in enumerate(STATE)}
    return Info(
        mode=Mode.SPATIAL,
        format=Layout.CHANNELS_FIRST,
        data_type=DataType.FLOAT32,
        nan_policy="propagate",
        dims=(1, 6, 1, 1),
        strides=(6, 1, 1, 1),
        epsilon=1e-5 + 2.0**-60,
        exponential_average_factor=1 / 3,
        **arrays,
    )


def test_json_brings_back_every_bit(info):
    back = Info.from_json(info.to_json())
    assert (back, hash(back)) == (info, hash(info))
    for field in dataclasses.fields(Info):
        old, new = getattr(info, field.name), getattr(back, field.name)
        assert type(old) is type(new)
        assert (old.tobytes() == new.tobytes()) if isinstance(old, np.ndarray) else (old == new), field.name
    assert dataclasses.replace(info, saved_mean=info.running_variance) != info
    assert Info.from_json(info.to_json().encode()) == info
    assert info != "an info"
    small = dataclasses.replace(info, **{n: np.full((1, 6, 1, 1), 1.0, np.float32) for n in STATE})
    assert json.loads(small.to_json())["saved_mean"] == "AACAPwAAgD8AAIA/AACAPwAAgD8AAIA/"  # little-endian base64


@table(
    ("change", "argument"),
    [
        *[({f.name: ...}, f.name) for f in dataclasses.fields(Info)],
        *[({name: value}, name) for name in STATE for value in ("AAAA", 3)],
        ({"saved_mean": "AAAA!" * 8}, "saved_mean"),
        *[({"kind": value}, "text") for value in ("other", ...)],
        *[({"version": value}, "text") for value in (3, True, ...)],
        *[({"mode": value}, "mode") for value in ("NONE", 1)],
        # is also a derived shape of that mode: only the strides tell
        ({"mode": "PER_ACTIVATION", "strides": [12, 1, 1, 1]}, "strides"),
        ({"format": "CHANNELS_LAST"}, "format"),
        ({"data_type": "FLOAT16"}, "data_type"),
        ({"data_type": "FLOAT64"}, "running_mean"),
        ({"nan_policy": "ignore"}, "nan_policy"),
        ({"dims": [4, 6, 1, 1]}, "running_mean"),
        *[({"dims": value}, "dims") for value in ([1, 3, 2, 1], [1, 6.0, 1, 1])],
        *[({"strides": value}, "strides") for value in ([6, 2, 1, 1], [6, 1, 1])],
        *[({"epsilon": value}, "epsilon") for value in (-1.0, "1e-5")],
        ({"exponential_average_factor": 1.5}, "exponential_average_factor"),
        ({"extra": 1}, "extra"),
        *[(text, "text") for text in ("", "{", "[]", "3", b"\xff", None)],
    ],
)
def test_bad_json_is_refused_by_name(info, change, argument):
    text = change
    if isinstance(change, dict):
        values = json.loads(info.to_json()) | change
        text = json.dumps({name: value for name, value in values.items() if value is not ...})
    with pytest.raises(ArgumentError) as caught:
        Info.from_json(text)
    assert caught.value.argument == argument


@table(
    ("argument", "value"),
    [
        ("running_mean", [0.0] * 6),
        ("saved_mean", np.zeros((1, 6, 1, 1))),
        ("saved_inv_variance", np.zeros(6, np.float32)),
        ("dims", (2, 6, 1, 1)),
        ("format", True),
        ("data_type", "bf16"),
    ],
)
def test_bad_info_is_refused_by_name(info, argument, value):
    with pytest.raises(ArgumentError) as caught:
        dataclasses.replace(info, **{argument: value})
    assert caught.value.argument == argument


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
def test_trained_here_inferred_there(place, other, mode, layout, tmp_path):
    """From every backend that executes to every other (and itself), through a file; and against the reference."""
    common = {"mode": mode, "layout": layout}
    there = Place(other)
    if not (executes(place.handle, mode, DataType.FLOAT32, layout) and executes(other, mode, DataType.FLOAT32, layout)):
        pytest.skip("one of the two refuses this layout")
    with staged(place, mode) as layer:
        for n in range(3):
            judged(place, layer, problem_of(TRAIN, **common, seed=n, eps=3e-4, factor=cumulative_average_factor(n)))
        file = tmp_path / "layer.json"
        file.write_text(layer.info().to_json())
        problem = problem_of(INFER, **common, seed=9, eps=3e-4)
        judged(place, layer, problem)
        info = layer.info()
    with BatchNorm.restore(other, Info.from_json(file.read_text()), device=there.device) as restored:
        assert restored.info() == info
        # Judged by the reference with the same bound, so the two agree; with the epsilon it was trained with, which
        # nobody names again.
        judged(there, restored, problem)
        # And it goes on: training and backward from the restored state.
        judged(there, restored, problem_of(TRAIN, **common, seed=11, factor=0.5))


def test_restore_takes_over_backwards_statistics(place):
    with staged(place) as layer:
        untrained = layer.info()
        trained = judged(place, layer, problem_of(TRAIN))
        info = layer.info()
    problem = problem_of(BACKWARD)
    with (
        BatchNorm.restore(place.handle, untrained, device=place.device) as fresh,
        pytest.raises(ArgumentError, match=r"^layer: got a layer without saved statistics"),
    ):
        judged(place, fresh, problem)
    with BatchNorm.restore(place.handle, info, device=place.device) as restored:
        judged(place, restored, problem, x=trained.x, scale=trained.scale)


def test_a_persistent_state_is_restored_as_spatial(place):
    with staged(place) as layer:
        judged(place, layer, problem_of(TRAIN, eps=1e-3))
        info = dataclasses.replace(layer.info(), mode=Mode.SPATIAL_PERSISTENT)
    if executes(place.handle, Mode.SPATIAL_PERSISTENT, DataType.FLOAT32, Layout.CHANNELS_FIRST):
        BatchNorm.restore(place.handle, info, device=place.device).close()
    else:
        with pytest.raises(UnsupportedError, match="SPATIAL_PERSISTENT"):
            BatchNorm.restore(place.handle, info, device=place.device)
    with BatchNorm.restore(place.handle, info, mode=Mode.SPATIAL, device=place.device) as layer:
        assert layer.info() == dataclasses.replace(info, mode=Mode.SPATIAL)
        judged(place, layer, problem_of(INFER, eps=1e-3))
    with pytest.raises(ArgumentError, match=r"^mode: "):
        BatchNorm.restore(place.handle, info, mode=Mode.PER_ACTIVATION, device=place.device)


# ---------------------------------------------------------------- order of calls, ownership


def uses(place):
    """Everything that needs statistics."""
    problem = problem_of(BACKWARD)
    inputs = data.generate(problem)
    x, scale = place.put(inputs.x), place.put(inputs.scale)
    return {
        "bias_scale_properties": lambda layer: layer.bias_scale_properties(),
        "info": lambda layer: layer.info(),
        **{name: lambda layer, name=name: getattr(layer, name) for name in STATE},
        "forward_training": lambda layer: layer.forward_training(x, scale, scale, x),
        "forward_inference": lambda layer: layer.forward_inference(x, scale, scale, x),
        "backward": lambda layer: layer.backward(x, x, scale, x, scale, scale),
        "backward_prop": lambda layer: layer.backward_prop(x, x, scale, x, scale, scale),
    }


def test_nothing_works_before_stage(place):
    with make(place) as layer:
        assert not layer.staged
        assert "not staged" in repr(layer)
        for use in uses(place).values():
            with pytest.raises(ArgumentError, match=r"^layer: .*not staged.*stage\(x\) first"):
                use(layer)


def test_nothing_works_after_close(place):
    layer = staged(place)
    layer.close()
    layer.close()
    assert layer.closed
    assert not place.handle.closed
    for use in uses(place).values():
        with pytest.raises(ClosedError, match=r"^layer: "):
            use(layer)
    with pytest.raises(ClosedError, match=r"^layer: "):
        layer.stage(place.put(np.empty(SHAPE, np.float32)))
    with pytest.raises(ClosedError), layer:
        pass
    assert repr(layer) == "<BatchNorm closed>"


def test_close_lets_the_memory_go(place):
    layer = staged(place)
    kept = layer.running_mean
    if place.device.device_type == 1:  # NumPy's memory can be watched
        watched = [weakref.ref(getattr(layer, name).owner.memory) for name in STATE]
        layer.close()
        assert [w() is not None for w in watched] == [True, False, False, False]
    layer.close()
    assert np.all(place.get(kept) == 0)  # a buffer taken before outlives the layer
    assert not place.handle.closed


def test_a_closed_handle_is_named(backend, place):
    with pybnorm.Handle(backend) as handle:
        if place.device.stream:
            handle.set_stream(place.device.stream)
        layer = BatchNorm.spatial(handle, device=place.device)
        layer.stage(place.put(np.empty(SHAPE, np.float32)))
    for name in ("forward_training", "forward_inference"):
        with pytest.raises(ClosedError, match=r"^handle: "):
            uses(place)[name](layer)
    with pytest.raises(ClosedError, match=r"^handle: "):
        BatchNorm.spatial(handle)
    layer.close()


# ---------------------------------------------------------------- bad input


@table(
    ("argument", "value"),
    [
        *[("epsilon", value) for value in (-1e-9, float("nan"))],
        *[("exponential_average_factor", value) for value in (1.1, "x")],
        *[("initial_running_variance", value) for value in (-1.0, float("inf"), None)],
    ],
)
def test_bad_construction_is_refused_by_name(handle, argument, value):
    with pytest.raises(ArgumentError) as caught:
        BatchNorm.spatial(handle, **{argument: value})
    assert caught.value.argument == argument


def test_bad_handles_modes_and_infos_are_refused_by_name(handle, info):
    for wrong in (None, 3, "onednn"):
        with pytest.raises(ArgumentTypeError, match=r"^handle: "):
            BatchNorm.spatial(wrong)
        with pytest.raises(ArgumentTypeError, match=r"^handle: "):
            BatchNorm.restore(wrong, info)
    with pytest.raises(ArgumentError, match=r"^mode: "):
        BatchNorm(handle, 3)
    with pytest.raises(ArgumentTypeError, match=r"^info: "):
        BatchNorm.restore(handle, info.to_json())


def test_bad_x_to_stage_is_refused_by_name(place):
    shapes = [(SHAPE, np.int32), (5, np.float32), ((2, 3, 4, 0), np.float32)]
    bad = [(None, ""), *[(np.empty(shape, dtype), "") for shape, dtype in shapes]]
    for backend in pybnorm.backends():
        with contextlib.suppress(pybnorm.LibraryError):
            if backend != place.handle.backend:
                bad.append((pybnorm.TensorDescriptor(backend, "f32", SHAPE), backend))
    with make(place) as layer:
        for x, text in bad:
            with pytest.raises(ArgumentError, match=rf"^x: .*{text}"):
                layer.stage(x)
            assert not layer.staged


def test_x_unlike_the_staged_one_is_refused_by_name(place):
    scale = place.put(np.ones(SHAPE[1], np.float32))
    with staged(place) as layer:
        for wrong in (
            np.empty((4, 2, 5, 6), np.float32),
            np.empty((4, 3, 5), np.float32),
            np.empty(SHAPE, np.float64),
            np.empty(4, np.float32),
            np.empty(SHAPE, np.int64),
        ):
            x = wrong if wrong.dtype == np.int64 else place.put(wrong)
            for call in (
                lambda x=x: layer.forward_training(x, scale, scale, x),
                lambda x=x: layer.forward_inference(x, scale, scale, x),
                lambda x=x: layer.backward(x, x, scale, x, scale, scale),
            ):
                with pytest.raises(ArgumentError, match=r"^x: "):
                    call()
    wide, single = (place.put(np.ones(dims, np.float32)) for dims in ((4, 3, 5, 7), (1, *SHAPE[1:])))
    with staged(place, Mode.PER_ACTIVATION) as layer:
        with pytest.raises(ArgumentError, match=r"^x: .*\(1, 3, 5, 6\)"):
            layer.forward_inference(wide, scale, scale, wide)
        with pytest.raises(ArgumentError, match=r"^x: .*two elements per statistic"):
            layer.forward_training(single, single, single, place.put(np.zeros((1, *SHAPE[1:]), np.float32)))


def test_other_arguments_are_refused_by_name(place):
    inputs = data.generate(problem_of(BACKWARD))
    x, dy, scale = place.put(inputs.x), place.put(inputs.dy), place.put(inputs.scale)
    y, dx = (place.put(np.zeros_like(inputs.x)) for _ in range(2))
    bias, dscale, dbias = (place.put(np.zeros_like(inputs.scale)) for _ in range(3))
    forward = {"x": x, "scale": scale, "bias": bias, "y": y}
    back = {"x": x, "dy": dy, "scale": scale, "dx": dx, "dscale": dscale, "dbias": dbias}
    short = place.put(np.ones(2, np.float32))
    with staged(place) as layer:
        judged(place, layer, problem_of(TRAIN))
        info = layer.info()
        cases = [
            *[(layer.forward_training, forward, n, v) for n, v in (("alpha", "a"), ("beta", None), ("epsilon", -1))],
            *[(layer.forward_training, forward, "exponential_average_factor", v) for v in (-0.1, 1.5, "x")],
            *[(layer.forward_inference, forward, n, v) for n, v in (("alpha", 1e39), ("beta", "b"), ("epsilon", -1))],
            *[
                (call, forward, n, short)
                for call in (layer.forward_training, layer.forward_inference)
                for n in ("scale", "bias", "y")
            ],
            *[(layer.backward, back, n, "x") for n in ("alpha", "beta", "alpha_param", "beta_param")],
            (layer.backward, back, "epsilon", -1.0),
            *[(layer.backward, back, n, short) for n in ("dy", "scale", "dx", "dscale", "dbias")],
            (layer.forward_training, forward, "y", None),
            (layer.forward_training, forward, "workspace", "none"),
        ]
        for call, arguments, name, value in cases:
            with pytest.raises(ArgumentError) as caught:
                call(**(arguments | {name: value}))
            assert caught.value.argument == name, (call, name, value)
        with pytest.raises(ArgumentError, match=r"^layer: .*staged already"):
            layer.stage(x)
        assert layer.info() == info
        with pytest.raises(ArgumentError, match=r"^running_mean: .*overlaps scale"):
            layer.forward_training(x, layer.running_mean, bias, y)


def test_the_device_must_be_the_handles(place):
    x = place.put(np.empty(SHAPE, np.float32))

    def like(kind, stream):
        return type("Like", (), {"device_type": kind, "name": "another", "stream": stream, "from_numpy": None})()

    for bad in (object(), "cpu", 0):
        with pytest.raises(ArgumentError, match=r"^device: got"):
            BatchNorm.spatial(place.handle, device=bad)
    for wrong in (like(99, 0), like(place.device.device_type, 0x5EED)):
        layer = BatchNorm.spatial(place.handle, device=wrong)
        with pytest.raises(ArgumentError, match=r"^device: "):
            layer.stage(x)
        assert not layer.staged
    layer = BatchNorm.spatial(place.handle)
    if place.device.device_type == 1:
        layer.stage(x)
        assert np.all(devices.device_for(1).to_numpy(layer.running_variance) == 1)
    else:
        with pytest.raises(ArgumentError, match=r"^device: got None"):
            layer.stage(x)


# ---------------------------------------------------------------- gocudnn's own JSON


def gocudnn_info(kind=0, **changes):
    """As Go writes it: numbers for enumerations, base64 for bytes; epsilon and the factor are never filled there."""
    dtype = np.dtype(["<f4", "<f8"][kind])
    statistics = np.arange(12).reshape(4, 3).astype(dtype) / 8 + 0.125
    values = {"Epsilon": 0, "Exponentialfactor": 0, "Mode": 1, "Format": 0, "DataType": kind, "Nan": 0}
    values |= {"Dims": [1, 3, 1, 1], "Stride": [3, 1, 1, 1]}
    for name, row in zip(("RRM", "RRV", "RSM", "RSV"), statistics, strict=True):
        values[name] = base64.b64encode(row.tobytes()).decode()
    return statistics, values | changes


@pytest.mark.parametrize("kind", [0, 1])
def test_gocudnns_json_is_read_and_written(kind):
    statistics, values = gocudnn_info(kind)
    info = Info.from_gocudnn_json(json.dumps(values))
    assert (info.mode, info.data_type, info.dims) == (Mode.SPATIAL, DataType(kind), (1, 3, 1, 1))
    names = ("running_mean", "running_variance", "saved_mean", "saved_inv_variance")
    for name, row in zip(names, statistics, strict=True):
        np.testing.assert_array_equal(getattr(info, name).reshape(-1), row)
    assert json.loads(info.to_gocudnn_json()) == values | {"Nan": 1}
    older = {name: row.tolist() for name, row in zip(("RRM", "RRV", "RSM", "RSV"), statistics, strict=True)}
    assert Info.from_gocudnn_json(json.dumps(values | older)) == info
    own = dataclasses.replace(info, epsilon=1e-3, exponential_average_factor=0.1, mode=Mode.SPATIAL_PERSISTENT)
    again = Info.from_gocudnn_json(own.to_gocudnn_json())
    assert again == dataclasses.replace(own, exponential_average_factor=0.0)


@table(
    ("argument", "changes"),
    [
        *[("Mode", {"Mode": value}) for value in (3, True)],
        ("DataType", {"DataType": 2}),
        ("Format", {"Format": 1}),
        ("dims", {"Dims": [1, 1, 1, 3], "Stride": [3, 3, 3, 1]}),
        ("Stride", {"Stride": [3, 2, 1, 1]}),
        ("RRV", {"RRV": "AAAA"}),
        ("RSM", {"RSM": [1, 2]}),
        ("RSV", {"RSV": [1, 2, "3"]}),
        ("epsilon", {"Epsilon": -1}),
        ("Exponentialfactor", {"Exponentialfactor": 2}),
        *[("text", text) for text in ("{", "[]", json.dumps({"Mode": 1}))],
    ],
)
def test_what_is_not_gocudnns_json_is_refused_by_name(argument, changes):
    text = changes if isinstance(changes, str) else json.dumps(gocudnn_info(**changes)[1])
    with pytest.raises(ArgumentError) as info:
        Info.from_gocudnn_json(text)
    assert info.value.argument == argument
