"""DirectML's operators on every backend that computes, against the reference, and their constraints."""

import numpy as np
import pytest
from parts import DTYPES, A, U, batch, fresh, hold, kept, laid_out, over, perform, subsets, sums_errors, upload, wide
from tables import spread, table

import pybnorm
from pybnorm import directml, reference
from pybnorm.check.judging import bounds
from pybnorm.operations import elementwise

SHAPES = [
    ((9,), (1,)),
    ((9,), (9,)),
    ((6, 5), (1, 5)),
    ((6, 5), (6, 1)),
    ((6, 5), (1, 1)),
    ((6, 5, 4), (1, 5, 1)),
    ((4, 3, 5, 2), (1, 3, 1, 1)),
    ((4, 3, 5, 2), (1, 3, 5, 2)),
    ((4, 3, 5, 2), (4, 1, 1, 2)),
    ((4, 3, 5, 2), (1, 3, 1, 2)),
    ((4, 3, 5, 2), (4, 3, 5, 2)),
    ((2, 3, 4, 2, 3), (1, 3, 1, 1, 1)),
    ((2, 3, 1, 2, 3, 2, 1, 2), (1, 3, 1, 2, 1, 2, 1, 1)),
    ((2, 3, 1, 2, 3, 2, 1, 2), (1, 3, 1, 1, 1, 1, 1, 1)),
]
ORDERS = ["C", "last", "gaps"]
dtypes = pytest.mark.parametrize("dtype", ["f32", "f16"])


def in_pairs(shapes, turn):
    """Each shape, and each data type with each order."""
    rows = [(*shape, dtype, order) for shape, dtype, order in spread(shapes, ["f32", "f16"], ORDERS, turn=turn)]
    return table(("dims", "derived", "dtype", "order"), rows)


def arrays(dims, derived, dtype, order="C", seed=0):
    """x, dy, mean, variance, scale, bias in one dtype, as DirectML wants them."""
    random = np.random.default_rng([seed, *dims, *derived])
    kind = DTYPES[dtype]
    data = [laid_out(random.normal(0.5, 2, dims).astype(kind), order) for _ in range(2)]
    mean, scale, bias = (random.normal(0.5, 1, derived).astype(kind) for _ in range(3))
    return *data, mean, random.uniform(0.5, 3, derived).astype(kind), scale, bias


def call(bench, name, *arguments, written, **options):
    def query(handle, *a, **o):
        return directml.workspace_size(handle, name, *a, **o)

    label = "directml." + (name.removeprefix("batch_normalization").strip("_") or "inference")
    return perform(bench, label, getattr(directml, name), query, *arguments, written=written, **options)


# ---------------------------------------------------------------- gradients


@in_pairs(SHAPES, 1)
def test_grad_is_that_of_frozen_statistics(bench, dims, derived, dtype, order):
    x, dy, mean, variance, scale, _ = arrays(dims, derived, dtype, order)
    dx, dscale, dbias = fresh(dy), fresh(mean), fresh(mean)
    call(bench, "batch_normalization_grad", x, dy, mean, variance, scale, dx, dscale, dbias, 1e-3,
         written=(dx, dscale, dbias))  # fmt: skip
    want = reference.backward_frozen(x, dy, scale=scale, mean=mean, variance=variance, epsilon=1e-3, axis=kept(derived))
    r = 1 / np.sqrt(wide(variance) + 1e-3)
    _, e_total, e_moment = sums_errors(x, dy, mean, derived)
    zero = np.zeros(derived)
    e_dx = bounds.forward_error(wide(dy), zero, r, wide(scale), zero, (zero, 4 * U * r), U)
    hold(dx, want.dx, e_dx, name="dx")
    hold(dscale, want.dscale, r * e_moment + A * np.abs(want.dscale), name="dscale")
    hold(dbias, want.dbias, e_total, name="dbias")


@in_pairs(SHAPES, 2)
def test_training_grad_is_that_of_training(bench, dims, derived, dtype, order):
    x, dy, mean, variance, scale, _ = arrays(dims, derived, dtype, order)
    dx, dscale, dbias = fresh(dy), fresh(mean), fresh(mean)
    call(bench, "batch_normalization_training_grad", x, dy, mean, variance, scale, dx, dscale, dbias, 1e-3,
         written=(dx, dscale, dbias))  # fmt: skip
    want = reference.training_grad(x, dy, scale=scale, mean=mean, variance=variance, epsilon=1e-3, axis=kept(derived))
    r = 1 / np.sqrt(wide(variance) + 1e-3)
    m, e_total, e_moment = sums_errors(x, dy, mean, derived)
    e_dscale = r * e_moment + A * np.abs(want.dscale)
    e_dx = bounds.backward_error(
        wide(x), wide(dy), want.dx, wide(mean), r, wide(scale), want.dscale, want.dbias,
        (np.zeros(derived), A * r, e_dscale, e_total), m, U, False,
    )  # fmt: skip
    hold(dx, want.dx, e_dx, name="dx")
    hold(dscale, want.dscale, e_dscale, name="dscale")
    hold(dbias, want.dbias, e_total, name="dbias")


@table("axes", subsets(4))
def test_any_subset_of_axes_carries_parameters(bench, axes):
    dims = (3, 2, 4, 5)
    derived = tuple(d if a in axes else 1 for a, d in enumerate(dims))
    x, dy, mean, variance, scale, _ = arrays(dims, derived, "f32")
    dx, dscale, dbias = fresh(dy), fresh(mean), fresh(mean)
    call(bench, "batch_normalization_grad", x, dy, mean, variance, scale, dx, dscale, dbias,
         written=(dx, dscale, dbias))  # fmt: skip
    r = 1 / np.sqrt(wide(variance) + 1e-5)
    x, dy, mean, scale = wide(x, dy, mean, scale)
    _, e_total, e_moment = sums_errors(x, dy, mean, derived)
    hold(dx, dy * scale * r, 9 * U * np.abs(dy * scale * r))
    want = r * over(dy * (x - mean), derived)
    hold(dscale, want, r * e_moment + A * np.abs(want))
    hold(dbias, over(dy, derived), e_total)


# ---------------------------------------------------------------- inference


def e_inference(x, mean, variance, scale, bias, epsilon):
    x, mean, scale, bias = wide(x, mean, scale, bias)
    r = 1 / np.sqrt(wide(variance) + epsilon)
    return bounds.forward_error(x, mean, r, scale, bias, (np.zeros_like(mean), 4 * U * r), U)


def inference(x, mean, variance, scale, bias, epsilon):
    r = 1 / np.sqrt(wide(variance) + epsilon)
    return wide(scale) * r * (wide(x) - wide(mean)) + wide(bias)


@in_pairs(SHAPES, 3)
def test_inference(bench, dims, derived, dtype, order):
    x, _, mean, variance, scale, bias = arrays(dims, derived, dtype, order)
    y = fresh(x)
    call(bench, "batch_normalization", x, mean, variance, scale, bias, y, True, 1e-3, written=(y,))
    case = mean, variance, scale, bias, 1e-3
    hold(y, inference(x, *case), e_inference(x, *case), name="y")


@dtypes
@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 3, 1, 1), (1, 3, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)],
        [(1, 3, 1, 1), (1, 1, 1, 1), (4, 1, 1, 1), (1, 1, 5, 2)],
        [(1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (4, 3, 5, 2)],
        [(4, 1, 5, 1), (1, 3, 1, 2), (1, 3, 1, 1), (1, 3, 1, 1)],
    ],
    ids=str,
)
def test_inference_spreads_parameters_of_different_sizes(bench, dtype, sizes):
    x = arrays((4, 3, 5, 2), (1, 3, 1, 1), dtype)[0]
    mean, variance, scale, bias = (arrays(x.shape, s, dtype, seed=i)[2 + i] for i, s in enumerate(sizes))
    y = fresh(x)
    call(bench, "batch_normalization", x, mean, variance, scale, bias, y, written=(y,))
    case = *(np.broadcast_to(v, x.shape) for v in (mean, variance, scale, bias)), 1e-5
    hold(y, inference(x, *case), e_inference(x, *case), name="y")


def test_spatial_false_wants_statistics_per_location(bench):
    x, _, mean, variance, scale, bias = arrays((4, 3, 5, 2), (1, 3, 5, 2), "f32")
    y = fresh(x)
    call(bench, "batch_normalization", x, mean, variance, scale[:, :, :1, :1].copy(), bias, y, False, written=(y,))
    case = mean, variance, scale[:, :, :1, :1], bias, 1e-5
    hold(y, inference(x, *case), e_inference(x, *case))
    for name, argument in (("mean", 1), ("variance", 2)):
        arguments = [x, mean, variance, scale, bias, y]
        arguments[argument] = arguments[argument][:, :, :, :1].copy()
        buffers = [upload(bench, a) for a in arguments]
        with pytest.raises(pybnorm.ArgumentError, match="Height and Width") as caught:
            directml.batch_normalization(bench.handle, *buffers, False)
        assert caught.value.argument == name


# ---------------------------------------------------------------- training


def training_case(x, scale, bias, derived, epsilon):
    """What is right for y, mean and variance, and the errors allowed."""
    found, off = batch(x, derived, epsilon)
    x, scale, bias = wide(x, scale, bias)
    y = scale * found.inv_variance * (x - found.mean) + bias
    assert not off.undecided.any()
    error = bounds.forward_error(x, found.mean, found.inv_variance, scale, bias, (off.mean, off.inverse), U)
    return found, off, y, error


@in_pairs(SHAPES, 4)
@pytest.mark.parametrize("add", [False, True], ids=["plain", "add"])
def test_training_returns_mean_and_biased_variance(bench, dims, derived, dtype, order, add):
    x, z, _, _, scale, bias = arrays(dims, derived, dtype, order)
    y, mean, variance = fresh(x), fresh(scale), fresh(scale)
    call(bench, "batch_normalization_training", x, scale, bias, z if add else None, y, mean, variance, 1e-3,
         written=(y, mean, variance))  # fmt: skip
    found, off, want, error = training_case(x, scale, bias, derived, 1e-3)
    hold(y, want, error, prior=wide(z), beta=float(add), name="y")
    hold(mean, found.mean, off.mean, name="mean")
    hold(variance, found.variance, off.variance + 2 * A * found.variance, name="variance")
    if x.size == scale.size:
        assert not variance.any()
    else:
        unbiased = found.variance * (x.size // scale.size) / (x.size // scale.size - 1)
        with pytest.raises(AssertionError):  # the bound tells the two conventions apart
            hold(variance, unbiased, off.variance + 2 * A * found.variance)


def test_training_keeps_the_digits_of_a_variance_below_epsilon(bench):
    random = np.random.default_rng(5)
    x = (1e-4 * random.normal(size=(16, 3, 4))).astype(np.float32)
    scale = bias = np.ones((1, 3, 1), np.float32)
    y, mean, variance = fresh(x), fresh(scale), fresh(scale)
    call(bench, "batch_normalization_training", x, scale, bias.copy(), None, y, mean, variance, 1.0,
         written=(y, mean, variance))  # fmt: skip
    found, off, _, _ = training_case(x, scale, bias, (1, 3, 1), 1.0)
    hold(variance, found.variance, off.variance + 2 * A * found.variance)
    from_inverse = (1 / (1 / np.sqrt(found.variance.astype(np.float32) + np.float32(1))) ** 2 - np.float32(1)).astype(
        np.float32
    )
    with pytest.raises(AssertionError):  # what 1 / inv_variance**2 - epsilon would have made of it
        hold(from_inverse, found.variance, off.variance + 2 * A * found.variance)


@pytest.mark.parametrize(
    "given", [("identity", 1, 0), ("linear", -0.5, 3.0), ("linear", 0.0, 2.0), ("linear", 2.0, 0.0)]
)
@pytest.mark.parametrize("add", [False, True], ids=["plain", "add"])
def test_fused_activations_that_are_affine(bench, given, add):
    _, alpha, beta = given
    x, z, mean, variance, scale, bias = arrays((4, 3, 5), (1, 3, 1), "f32")
    activation = directml.Activation(*given)
    found, off, want, error = training_case(x, scale, bias, (1, 3, 1), 1e-5)
    z64 = wide(z) if add else np.zeros(x.shape)
    y, out_mean, out_variance = fresh(x), fresh(scale), fresh(scale)
    call(bench, "batch_normalization_training", x, scale, bias, z if add else None, y, out_mean, out_variance, 1e-5,
         activation, written=(y, out_mean, out_variance))  # fmt: skip
    size = abs(alpha) * (np.abs(wide(scale)) * found.inv_variance * np.abs(wide(x) - found.mean) + np.abs(wide(bias)))
    extra = 2 * A * (size + abs(beta) + np.abs(alpha * z64))
    hold(y, alpha * (want + z64) + beta, abs(alpha) * error + extra, name="y")
    hold(out_mean, found.mean, off.mean)
    if not add:
        case = mean, variance, scale, bias, 1e-5
        y = fresh(x)
        call(bench, "batch_normalization", x, *case[:4], y, True, 1e-5, activation, written=(y,))
        r = 1 / np.sqrt(wide(variance) + 1e-5)
        size = abs(alpha) * (np.abs(wide(scale)) * r * np.abs(wide(x) - wide(mean)) + np.abs(wide(bias)))
        error = abs(alpha) * e_inference(x, *case) + 2 * A * (size + abs(beta))
        hold(y, alpha * inference(x, *case) + beta, error, name="inference")


def refuses_relu(bench, name, *arguments, why):
    """Query and call say why, and nothing is written."""
    buffers = [upload(bench, a) if isinstance(a, np.ndarray) else a for a in arguments]
    memory, address = bench.memory(1 << 20)
    with pytest.raises(pybnorm.UnsupportedError, match=why) as caught:
        getattr(directml, name)(bench.handle, *buffers, fused_activation="relu", workspace=(address, 1 << 20))
    assert caught.value.function == "relu"
    with pytest.raises(pybnorm.UnsupportedError, match=why):
        directml.workspace_size(bench.handle, name, *buffers, fused_activation="relu")
    for array, buffer in zip(arguments, buffers, strict=True):
        if isinstance(array, np.ndarray):
            np.testing.assert_array_equal(bench.device.to_numpy(buffer), array)
    assert bench.intact(memory, address, 0)


RELU_SHAPES = [(dims, derived) for dims, derived in SHAPES if np.prod(dims) >= 30]


@in_pairs(RELU_SHAPES, 5)
def test_relu_after_inference(bench, dims, derived, dtype, order):
    x, _, mean, variance, scale, bias = arrays(dims, derived, dtype, order)
    y = fresh(x)
    case = mean, variance, scale, bias, 1e-3
    call(bench, "batch_normalization", x, *case[:4], y, True, 1e-3, "relu", written=(y,))
    hold(y, inference(x, *case), e_inference(x, *case), relu=True, name="y")


@in_pairs(RELU_SHAPES, 6)
@pytest.mark.parametrize("add", [False, True], ids=["plain", "add"])
def test_relu_after_training_and_the_addition(bench, dims, derived, dtype, order, add):
    x, z, _, _, scale, bias = arrays(dims, derived, dtype, order)
    if add:
        z -= z.dtype.type(3)  # far from 0: before and behind the addition are not alike
    y, mean, variance = fresh(x), fresh(scale), fresh(scale)
    outputs = y, mean, variance
    call(bench, "batch_normalization_training", x, scale, bias, z if add else None, *outputs, 1e-3, "relu",
         written=outputs)  # fmt: skip
    found, off, want, error = training_case(x, scale, bias, derived, 1e-3)
    hold(y, want, error, prior=wide(z), beta=float(add), relu=True, name="y")
    hold(mean, found.mean, off.mean, name="mean")
    hold(variance, found.variance, off.variance + 2 * A * found.variance, name="variance")


def test_a_backend_without_relu_refuses_before_anything_is_written(bench, monkeypatch):
    capability = elementwise.capability

    def without(backend, operation, *rest):
        return (0, "no relu for this") if operation == pybnorm.Operation.RELU else capability(backend, operation, *rest)

    monkeypatch.setattr(elementwise, "capability", without)
    x, z, mean, variance, scale, bias = arrays((4, 3, 5), (1, 3, 1), "f32")
    refuses_relu(bench, "batch_normalization", x, mean, variance, scale, bias, fresh(x), why="no relu for this")
    outputs = fresh(x), fresh(scale), fresh(scale)
    refuses_relu(bench, "batch_normalization_training", x, scale, bias, z, *outputs, why="no relu for this")


@table("kind", sorted(set(directml.ACTIVATIONS) - {"identity", "linear", "relu"}))
def test_other_activations_are_refused_by_name(bench, kind):
    x, _, mean, variance, scale, bias = arrays((4, 3, 5), (1, 3, 1), "f32")
    buffers = [upload(bench, a) for a in (x, mean, variance, scale, bias)]
    y = upload(bench, fresh(x))
    with pytest.raises(pybnorm.UnsupportedError, match=f"activation '{kind}'"):
        directml.batch_normalization(bench.handle, *buffers, y, fused_activation=directml.Activation(kind))
    assert np.isnan(bench.device.to_numpy(y)).all()


@pytest.mark.parametrize("value", ["RELU", "", 3, directml.Activation("maxout"), ("linear", 1, 0)])
def test_unknown_activations_are_bad_arguments(bench, value):
    buffers = [upload(bench, a) for a in arrays((4, 3, 5), (1, 3, 1), "f32")]
    x, y, *parameters = buffers
    with pytest.raises(pybnorm.ArgumentError) as caught:
        directml.batch_normalization(bench.handle, x, *parameters, y, fused_activation=value)
    assert caught.value.argument == "fused_activation"
    assert "relu" in caught.value.allowed


# ---------------------------------------------------------------- workspace


# ---------------------------------------------------------------- bad input

DIMS, DERIVED = (4, 3, 5, 2), (1, 3, 1, 1)
FIELDS = {
    "batch_normalization": ["input", "mean", "variance", "scale", "bias", "output"],
    "batch_normalization_grad": [
        "input", "input_gradient", "mean", "variance", "scale",
        "output_gradient", "output_scale_gradient", "output_bias_gradient",
    ],
    "batch_normalization_training": ["input", "scale", "bias", "fused_add", "output", "output_mean", "output_variance"],
}  # fmt: skip
FIELDS["batch_normalization_training_grad"] = FIELDS["batch_normalization_grad"]
DATA = {"input", "input_gradient", "output", "output_gradient", "fused_add"}
EVERY = [(operator, field) for operator, fields in FIELDS.items() for field in fields]


def good(operator):
    return {
        field: np.ones(DIMS if field in DATA else DERIVED, np.float32) if "output" not in field
        else np.full(DIMS if field in DATA else DERIVED, np.nan, np.float32)
        for field in FIELDS[operator]
    }  # fmt: skip


def refuse(bench, operator, fields, argument, text, kind=pybnorm.ArgumentError, **options):
    """The call is refused with the argument's name, and writes nothing."""
    uploaded = {n: upload(bench, a) if isinstance(a, np.ndarray) else a for n, a in fields.items()}
    for function in (getattr(directml, operator), lambda *a, **o: directml.workspace_size(a[0], operator, *a[1:], **o)):
        with pytest.raises(kind) as caught:
            function(bench.handle, **uploaded, **options)
        assert caught.value.argument == argument
        assert text in str(caught.value), caught.value
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            assert bench.device.to_numpy(uploaded[name]).tobytes() == value.tobytes(), name


@table(("operator", "field"), EVERY)
def test_every_field_is_required_but_the_fused_add(bench, operator, field):
    fields = good(operator) | {field: None}
    if field == "fused_add":
        present = {n: upload(bench, a) for n, a in fields.items() if a is not None}
        directml.workspace_size(bench.handle, operator, **present, fused_add=None)
        return
    refuse(bench, operator, fields, field, "None", pybnorm.ArgumentTypeError)


@table(("operator", "field"), EVERY)
def test_one_data_type_for_all(bench, operator, field):
    fields = good(operator)
    fields[field] = fields[field].astype(np.float16)
    argument = FIELDS[operator][1] if field == "input" else field  # the next one is compared with it
    refuse(bench, operator, fields, argument, "the DataType of input", pybnorm.ArgumentTypeError)


@pytest.mark.parametrize("dtype", ["bf16", "f64"])
@pytest.mark.parametrize("operator", FIELDS)
def test_only_the_data_types_of_directml(bench, operator, dtype):
    kind = np.float64 if dtype == "f64" else DTYPES[dtype]
    fields = {name: a.astype(kind) for name, a in good(operator).items()}
    refuse(bench, operator, fields, "input", "f32 or f16", pybnorm.ArgumentTypeError)


@table(("operator", "field"), [(o, f) for o, f in EVERY if f not in DATA])
def test_parameter_sizes(bench, operator, field):
    fields = good(operator)
    for dims, text in (((3,), "the DimensionCount of input, 4"), ((1, 2, 1, 1), "each size 1 or that of input")):
        refuse(bench, operator, fields | {field: np.ones(dims, np.float32)}, field, text)
    first = {"batch_normalization_training": "scale"}.get(operator, "mean")
    if operator != "batch_normalization":
        argument = field if field != first else FIELDS[operator][FIELDS[operator].index(first) + 1]
        refuse(bench, operator, fields | {field: np.ones((1, 3, 5, 1), np.float32)}, argument, f"the Sizes of {first}")
    gaps = np.ones((1, 3, 2, 1), np.float32)[:, :, :1]
    refuse(bench, operator, fields | {field: gaps}, field, "contiguous")


@pytest.mark.parametrize(("operator", "field"), [(o, f) for o, f in EVERY if f in DATA and f != "input"])
def test_data_sizes(bench, operator, field):
    refuse(bench, operator, good(operator) | {field: np.ones((4, 3, 5, 1), np.float32)}, field, "the Sizes of input")


@pytest.mark.parametrize("operator", FIELDS)
def test_dimension_counts(bench, operator):
    for dims in ((), (1,) * 9, (4, 0, 5, 2)):
        fields = good(operator) | {"input": np.ones(dims, np.float32)}
        refuse(bench, operator, fields, "input", "rank 1 to 8" if 0 not in dims else "sizes from 1")


@table("operator", FIELDS)
@table("value", [-1e-9, float("nan"), float("inf"), "1", None])
def test_epsilon(bench, operator, value):
    refuse(bench, operator, good(operator), "epsilon", "a finite number >= 0", epsilon=value)


def test_spatial_is_a_bool(bench):
    refuse(bench, "batch_normalization", good("batch_normalization"), "spatial", "True or False", spatial=1)


@table(("operator", "field"), [(o, f) for o, f in EVERY if "output" in f])
def test_outputs_have_memory_of_their_own(bench, operator, field):
    uploaded = {n: upload(bench, a) for n, a in good(operator).items()}
    others = [f for f in FIELDS[operator] if f != field and (f in DATA) == (field in DATA)]
    for other in others:
        with pytest.raises(pybnorm.ArgumentError, match="overlaps") as caught:
            getattr(directml, operator)(bench.handle, **{**uploaded, field: uploaded[other]})
        assert caught.value.argument in (field, other)


@table(("operator", "field"), [(o, f) for o, f in EVERY if "output" in f])
def test_outputs_are_writable(bench, operator, field):
    uploaded = {n: upload(bench, a) for n, a in good(operator).items()}
    uploaded[field] = uploaded[field]._replace(writable=False)
    with pytest.raises(pybnorm.ArgumentError, match="read-only") as caught:
        getattr(directml, operator)(bench.handle, **uploaded)
    assert caught.value.argument == field


def test_the_handle_and_the_operator_are_named(bench):
    fields = good("batch_normalization")
    with pytest.raises(pybnorm.ArgumentTypeError) as caught:
        directml.batch_normalization(None, **fields)
    assert caught.value.argument == "handle"
    closed = pybnorm.Handle(bench.handle.backend)
    closed.close()
    with pytest.raises(pybnorm.ClosedError):
        directml.batch_normalization(closed, **fields)
    for operator in ("batch_norm", None):
        with pytest.raises(pybnorm.ArgumentError, match="batch_normalization_training_grad") as caught:
            directml.workspace_size(bench.handle, operator, **fields)
        assert caught.value.argument == "operator"
