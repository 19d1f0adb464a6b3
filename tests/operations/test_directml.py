"""DirectML's operators on every backend that computes, against the reference, and their constraints."""

import itertools

import numpy as np
import pytest
from operation_bench import LAYOUTS, strided
from parts import DTYPES, near, perform, refuse, wide
from tables import spread, table

import pybnorm
from pybnorm import directml, reference
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
INFER, TRAIN = "batch_normalization", "batch_normalization_training"
WORDS = {
    INFER: "input mean variance scale bias output",
    TRAIN: "input scale bias fused_add output output_mean output_variance",
    **dict.fromkeys((f"{INFER}_grad", f"{TRAIN}_grad"), "input input_gradient mean variance scale output_gradient "
                                                       "output_scale_gradient output_bias_gradient"),
}  # fmt: skip
FIELDS = {operator: words.split() for operator, words in WORDS.items()}
DATA = {"input", "input_gradient", "output", "output_gradient", "fused_add"}
EVERY = [(operator, field) for operator, fields in FIELDS.items() for field in fields]
OUTPUTS = [(operator, field) for operator, field in EVERY if "output" in field]
DIMS, DERIVED = (4, 3, 5, 2), (1, 3, 1, 1)


def arguments(operator, dims=DIMS, derived=DERIVED, dtype="f32", order="packed"):
    """Arguments by DirectML's names, data in a memory order; NaN in outputs."""
    random, made = np.random.default_rng([*dims, *derived]), {}
    for field in FIELDS[operator]:
        values = random.normal(0.5, 2, dims if field in DATA else derived)
        if field == "variance":
            values = random.uniform(0.5, 3, derived)
        if "output" in field:
            values = np.full_like(values, np.nan)
        if field == "fused_add":
            values -= 3  # far from 0: before and behind the addition are not alike
        made[field] = strided(values.astype(DTYPES[dtype]), order if field in DATA else "packed")
    return made


def functions(operator):
    call = getattr(directml, operator)
    return call, lambda handle, **given: directml.workspace_size(handle, operator, **given)


def right(operator, a):
    """Results by DirectML's names in float64."""
    x, epsilon = wide(a["input"]), a.get("epsilon", 1e-5)
    axis = tuple(i for i, size in enumerate(a["scale"].shape) if size != 1)
    if operator.endswith("grad"):
        function = reference.training_grad if operator.startswith(TRAIN) else reference.backward_frozen
        vectors = {n: wide(a[n]) for n in ("mean", "variance", "scale")}
        found = function(x, wide(a["input_gradient"]), **vectors, epsilon=epsilon, axis=axis)
        names = ("output_gradient", "output_scale_gradient", "output_bias_gradient")
        return dict(zip(names, (found.dx, found.dscale, found.dbias), strict=True))
    others = {}
    if operator == TRAIN:
        mean, variance, _ = reference.stats(x, epsilon=epsilon, axis=axis)
        others = {"output_mean": mean, "output_variance": variance}
    else:
        mean, variance = wide(a["mean"]), wide(a["variance"])
    y = wide(a["scale"]) * (x - mean) / np.sqrt(variance + epsilon) + wide(a["bias"])
    if a.get("fused_add") is not None:
        y = y + wide(a["fused_add"])
    activation = a.get("fused_activation")
    if activation == "relu":
        assert x.size < 100 or (y.min() < 0 < y.max())
        y = np.maximum(y, 0)
    elif activation is not None:
        y = activation.alpha * y + activation.beta
    return {"output": y, **others}


def check(bench, operator, a):
    written = [f for f in FIELDS[operator] if "output" in f]
    results, want = perform(bench, functions(operator), a, written), right(operator, a)
    assert set(results) == set(written)
    for field, got in results.items():
        near(got, want[field], field)
    return results


CALLS = [
    (INFER, {}),
    (INFER, {"fused_activation": "relu"}),
    (f"{INFER}_grad", {}),
    (TRAIN, {"fused_add": None}),
    (TRAIN, {}),
    (TRAIN, {"fused_add": None, "fused_activation": "relu"}),
    (TRAIN, {"fused_activation": "relu"}),
    (f"{TRAIN}_grad", {}),
]


@pytest.mark.parametrize(("operator", "options"), CALLS, ids=str)
@table(("dims", "derived", "dtype", "order"),
       [(*s, dtype, order) for s, dtype, order in spread(SHAPES, ["f32", "f16"], LAYOUTS[:3])])  # fmt: skip
def test_results_are_the_references(bench, operator, options, dims, derived, dtype, order):
    check(bench, operator, arguments(operator, dims, derived, dtype, order) | options | {"epsilon": 1e-3})


@table("axes", [s for n in range(5) for s in itertools.combinations(range(4), n)])
def test_any_subset_of_axes_carries_parameters(bench, axes):
    dims = (3, 2, 4, 5)
    check(bench, f"{INFER}_grad", arguments(f"{INFER}_grad", dims, tuple(d if i in axes else 1 for i, d in
                                                                         enumerate(dims))))  # fmt: skip


@table("dtype", ["f32", "f16"])
@table("sizes", [
    [(1, 3, 1, 1), (1, 3, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)],
    [(1, 3, 1, 1), (1, 1, 1, 1), (4, 1, 1, 1), (1, 1, 5, 2)],
    [(1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (4, 3, 5, 2)],
    [(4, 1, 5, 1), (1, 3, 1, 2), (1, 3, 1, 1), (1, 3, 1, 1)],
])  # fmt: skip
def test_inference_spreads_parameters_of_different_sizes(bench, dtype, sizes):
    a = arguments(INFER, dtype=dtype)
    names = ("mean", "variance", "scale", "bias")
    a |= {n: arguments(INFER, DIMS, size, dtype)[n] for n, size in zip(names, sizes, strict=True)}
    check(bench, INFER, a)


def test_spatial_false_wants_statistics_per_location(bench):
    a = arguments(INFER, DIMS, (1, 3, 5, 2)) | {"spatial": False}
    a["scale"] = a["scale"][:, :, :1, :1].copy()
    check(bench, INFER, a)
    for name in ("mean", "variance"):
        refuse(bench, functions(INFER), a | {name: a[name][:, :, :1].copy()}, name, "Height and Width")
    refuse(bench, functions(INFER), a | {"spatial": 1}, "spatial", "True or False")


def test_training_keeps_the_digits_of_a_variance_below_epsilon(bench):
    a = arguments(TRAIN, (16, 3, 4), (1, 3, 1)) | {"fused_add": None, "epsilon": 1.0}
    a["input"] = a["input"] * np.float32(1e-4)
    got, want = check(bench, TRAIN, a)["output_variance"], right(TRAIN, a)["output_variance"]
    np.testing.assert_allclose(got, want, rtol=1e-5)  # 1 / inv_variance**2 - epsilon would have no digit right


@table("given", [("identity", 1, 0), ("linear", -0.5, 3.0), ("linear", 0.0, 2.0), ("linear", 2.0, 0.0)])
@table(("operator", "options"), [(INFER, {}), (TRAIN, {}), (TRAIN, {"fused_add": None})])
def test_fused_activations_that_are_affine(bench, given, operator, options):
    options = options | {"fused_activation": directml.Activation(*given)}
    check(bench, operator, arguments(operator, (4, 3, 5), (1, 3, 1)) | options)


def test_a_backend_without_relu_refuses_before_anything_is_written(bench, monkeypatch):
    capability = elementwise.capability

    def without(backend, operation, *rest):
        return (0, "no relu for this") if operation == pybnorm.Operation.RELU else capability(backend, operation, *rest)

    monkeypatch.setattr(elementwise, "capability", without)
    for operator in (INFER, TRAIN):
        with pytest.raises(pybnorm.UnsupportedError, match="no relu for this") as caught:
            bench.run(functions(operator), arguments(operator), (), {"fused_activation": "relu"})
        assert caught.value.function == "relu"
        bench.refuses(functions(operator), arguments(operator), FIELDS[operator], {"fused_activation": "relu"})


@table("kind", sorted(set(directml.ACTIVATIONS) - {"identity", "linear", "relu"}))
def test_other_activations_are_refused_by_name(bench, kind):
    activation = {"fused_activation": directml.Activation(kind)}
    with pytest.raises(pybnorm.UnsupportedError, match=f"activation '{kind}'"):
        directml.workspace_size(bench.handle, INFER, **bench.put(arguments(INFER)), **activation)
    bench.refuses(functions(INFER), arguments(INFER), FIELDS[INFER], activation)


# ---------------------------------------------------------------- bad input


def refused(bench, operator, changes, argument, text, kind=pybnorm.ArgumentError):
    refuse(bench, functions(operator), arguments(operator) | changes, argument, text, kind)


@table("value", ["RELU", "", 3, directml.Activation("maxout"), ("linear", 1, 0)])
def test_unknown_activations_are_bad_arguments(bench, value):
    refused(bench, INFER, {"fused_activation": value}, "fused_activation", "relu")


@table(("operator", "field"), EVERY)
def test_fields(bench, operator, field):
    """Each is required but the fused add, and has the input's dtype and its sizes, or those of a parameter."""
    if field == "fused_add":
        directml.workspace_size(bench.handle, operator, **bench.put(arguments(operator)) | {field: None})
    else:
        refused(bench, operator, {field: None}, field, "None", pybnorm.ArgumentTypeError)
    half = {field: arguments(operator)[field].astype(np.float16)}
    other = FIELDS[operator][1] if field == "input" else field  # the next one is compared with it
    refused(bench, operator, half, other, "the DataType of input", pybnorm.ArgumentTypeError)
    shapes = [((4, 3, 5, 1), "the Sizes of input")]
    if field == "input":
        shapes = [((), "rank 1 to 8"), ((1,) * 9, "rank 1 to 8"), ((4, 0, 5, 2), "sizes from 1")]
    elif field not in DATA:
        shapes = [((3,), "the DimensionCount of input, 4"), ((1, 2, 1, 1), "each size 1 or that of input")]
        first = "scale" if operator == TRAIN else "mean"
        if operator != INFER and field != first:
            shapes.append(((1, 3, 5, 1), f"the Sizes of {first}"))
        gaps = np.ones((1, 3, 2, 1), np.float32)[:, :, :1]
        refused(bench, operator, {field: gaps}, field, "contiguous")
    for dims, text in shapes:
        refused(bench, operator, {field: np.ones(dims, np.float32)}, field, text)


@table("dtype", [DTYPES["bf16"], np.float64])
@table("operator", FIELDS)
def test_only_the_data_types_of_directml(bench, operator, dtype):
    fields = {name: a.astype(dtype) for name, a in arguments(operator).items()}
    refused(bench, operator, fields, "input", "f32 or f16", pybnorm.ArgumentTypeError)


@table("operator", FIELDS)
@table("value", [-1e-9, float("nan"), float("inf"), "1", None])
def test_epsilon(bench, operator, value):
    refused(bench, operator, {"epsilon": value}, "epsilon", "a finite number >= 0")


@table(("operator", "field"), OUTPUTS)
def test_outputs_are_writable_and_have_memory_of_their_own(bench, operator, field):
    placed = bench.put(arguments(operator))
    refused(bench, operator, {field: placed[field]._replace(writable=False)}, field, "read-only")
    for other in FIELDS[operator]:
        if other != field and (other in DATA) == (field in DATA):
            refused(bench, operator, {field: placed[other], other: placed[other]}, f"{field}|{other}", "overlaps")


def test_the_handle_and_the_operator_are_named(bench):
    fields = bench.put(arguments(INFER))
    closed = pybnorm.Handle(bench.handle.backend)
    closed.close()
    for handle, kind in ((None, pybnorm.ArgumentTypeError), (closed, pybnorm.ClosedError)):
        with pytest.raises(kind, match="handle"):
            directml.batch_normalization(handle, **fields)
    for operator in ("batch_norm", None):
        with pytest.raises(pybnorm.ArgumentError, match=r"operator.*batch_normalization_training_grad"):
            directml.workspace_size(bench.handle, operator, **fields)
