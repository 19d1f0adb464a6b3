"""MIOpen's calls by its names, on every backend that executes: judged, and what differs from MIOpen held down."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
from layer_cases import DTYPES, LAYOUTS, MODES, SHAPE, Place, blends, executes, hold, problem_of

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
    miopen,
    operations,
)
from pybnorm.check.language import data

TRAIN, INFER, BACKWARD = Operation.FORWARD_TRAINING, Operation.FORWARD_INFERENCE, Operation.BACKWARD
F32, F16, BF16 = DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16

# The parameters of miopen.h's prototypes.
FRONT, ONE = "handle bn_mode alpha beta xDesc x yDesc y", "bnScaleBiasMeanVarDesc"
TRAIN_V2 = (
    f"{FRONT} scaleDesc biasVarDesc savedMeanDesc savedVarDesc bnScale bnBias expAvgFactor resultRunningMean "
    "resultRunningVariance epsilon resultSaveMean resultSaveInvVariance"
)
TRAIN_V3 = TRAIN_V2.replace(
    "resultRunningMean resultRunningVariance",
    "prevResultRunningMean prevResultRunningVariance nextResultRunningMean nextResultRunningVariance",
)
INFER_V2 = (
    f"{FRONT} scaleDesc biasDesc estMeanDesc estVarianceDesc bnScale bnBias estimatedMean estimatedVariance epsilon"
)
INVERSE = INFER_V2.replace("Variance", "InvVariance").removesuffix(" epsilon")
BACKWARD_V2 = (
    "handle bn_mode alphaDataDiff betaDataDiff alphaParamDiff betaParamDiff xDesc x dyDesc dy dxDesc dx scaleDesc "
    "biasDesc savedMeanDesc savedVarDesc bnScale resultBnScaleDiff resultBnBiasDiff epsilon savedMean savedInvVariance"
)
PROTOTYPES = {
    "batch_normalization_forward_training": re.sub("scaleDesc.*savedVarDesc", ONE, TRAIN_V2),
    "batch_normalization_forward_training_v2": TRAIN_V2,
    "batch_normalization_forward_training_v3": TRAIN_V3,
    "batch_normalization_forward_inference": re.sub("scaleDesc.*estVarianceDesc", ONE, INFER_V2),
    "batch_normalization_forward_inference_v2": INFER_V2,
    "batch_normalization_forward_inference_inv_variance": INVERSE,
    "batch_normalization_backward": re.sub("scaleDesc.*savedVarDesc", "bnScaleBiasDiffDesc", BACKWARD_V2),
    "batch_normalization_backward_v2": BACKWARD_V2,
    "batch_norm_forward_training_activation": f"{TRAIN_V2} activDesc",
    "batch_norm_forward_training_activation_v2": f"{TRAIN_V3} activDesc",
    "batch_norm_forward_inference_activation": f"{INFER_V2} activDesc",
    "batch_norm_forward_inference_activation_inv_variance": f"{INVERSE} activDesc",
    "batch_norm_backward_activation": BACKWARD_V2.replace("bnScale ", "bnScale bnBias ") + " activDesc",
}


def test_every_call_of_the_page_is_there_with_miopens_arguments_in_its_order():
    for name, prototype in PROTOTYPES.items():
        words = prototype.replace("biasVarDesc", "biasDesc").split()  # the header's slip: it describes the bias
        snake = [re.sub(r"(?<=[a-z])([A-Z])", lambda m: "_" + m[1].lower(), w).lower() for w in words]
        assert list(inspect.signature(getattr(miopen, name)).parameters) == [*snake, "workspace", "strict"]
    others = {"ActivationDescriptor", "ActivationMode", "cumulative_average_factor", "derive_bn_tensor_descriptor"}
    assert set(miopen.__all__) == {*PROTOTYPES, *others}


# ---------------------------------------------------------------- the calls on a problem

OPERANDS = miopen.OPERANDS
OUTPUTS = {name: operand.name for name, operand in OPERANDS.items() if operand.written}
PLAIN_DESC = {TRAIN: "bn_scale_bias_mean_var_desc", INFER: "bn_scale_bias_mean_var_desc"}
CALLS = {
    TRAIN: (miopen.batch_normalization_forward_training, miopen.batch_normalization_forward_training_v2),
    INFER: (miopen.batch_normalization_forward_inference, miopen.batch_normalization_forward_inference_v2),
    BACKWARD: (miopen.batch_normalization_backward, miopen.batch_normalization_backward_v2),
}
NAMES = {operation: list(inspect.signature(v2).parameters) for operation, (_, v2) in CALLS.items()}
DATA = ("x", "dy", "y", "dx")
# Which descriptor of a V2 call describes which parameters.
DESCRIBED = {
    operation: {
        desc: tuple(n for n in names if n in OPERANDS and OPERANDS[n].descriptor == desc)
        for desc in names
        if desc.endswith("_desc") and desc[:-5] not in DATA
    }
    for operation, names in NAMES.items()
}
# Where the inputs of a problem have a parameter by another name.
FIELDS = {"running_mean": "mean", "running_variance": "variance", "dscale": "prior_scale", "dbias": "prior_bias"}


class Case:
    """The arguments of one call, by MIOpen's names.

    `dtypes` gives the descriptors of a V2 call dtypes of their own; the inputs are rounded to them first.
    """

    def __init__(self, place, problem, dtypes=None, inputs=None):
        self.place, self.problem, self.dtypes = place, problem, dtypes
        self.inputs = inputs or data.generate(problem)
        operation, backend = problem.operation, place.handle.backend
        self.parameters = self._parameters()
        if dtypes:
            self._round()
        steps = problem.strides
        arrays = {"x": self.inputs.x, "dy": self.inputs.dy, "y": self.inputs.prior, "dx": self.inputs.prior}
        names = ("x", "dy", "dx") if operation == BACKWARD else ("x", "y")
        self.memory = {n: place.put(arrays[n], steps) for n in names}
        self.memory |= {n: place.put(a) for n, a in self.parameters.items() if a is not None}
        described = pybnorm.TensorDescriptor(backend, problem.dtype, problem.dims, steps)
        self.descs = {f"{n}_desc": described for n in names}
        self.derived = miopen.derive_bn_tensor_descriptor(described, problem.mode)
        self.options = self._options()

    def _parameters(self):
        i, problem, found = self.inputs, self.problem, {}
        for name in NAMES[problem.operation]:
            if name not in OPERANDS or name in DATA:
                continue
            ours = OPERANDS[name].name
            absent = not problem.saved if ours.startswith("saved") else not problem.running
            if OPERANDS[name].optional and absent and problem.operation != INFER:
                found[name] = None
            elif name.startswith("result_save"):
                found[name] = np.full_like(i.scale, np.nan)
            else:
                found[name] = getattr(i, FIELDS.get(ours, ours))
        return found

    def _round(self):
        """Parameters as stored in their own dtypes, and the same values in what the judge reads."""
        for name, array in self.parameters.items():
            if array is not None:
                stored = array.astype(data.numpy_dtype(self.dtypes[OPERANDS[name].descriptor]))
                self.parameters[name] = stored
                if not name.startswith("result_save"):
                    ours = OPERANDS[name].name
                    changed = {FIELDS.get(ours, ours): stored.astype(array.dtype)}
                    self.inputs = dataclasses.replace(self.inputs, **changed)

    def _options(self):
        p = self.problem
        options = {"handle": self.place.handle, "bn_mode": p.mode, "epsilon": p.epsilon}
        if p.operation == BACKWARD:
            names = ("alpha_data_diff", "beta_data_diff", "alpha_param_diff", "beta_param_diff")
            return options | dict(zip(names, (p.alpha, p.beta, p.alpha_param, p.beta_param), strict=True))
        options |= {"alpha": p.alpha, "beta": p.beta}
        return options | ({"exp_avg_factor": p.factor} if p.operation == TRAIN else {})

    def plain(self):
        desc = PLAIN_DESC.get(self.problem.operation, "bn_scale_bias_diff_desc")
        return self.descs | {desc: self.derived} | self.options | self._memory()

    def v2(self):
        descs = {}
        for name in DESCRIBED[self.problem.operation]:
            dtype = (self.dtypes or {}).get(name, self.derived.dtype)
            descs[name] = pybnorm.TensorDescriptor(self.place.handle.backend, dtype, self.derived.dims)
        return self.descs | descs | self.options | self._memory()

    def _memory(self):
        return dict.fromkeys(self.parameters) | self.memory

    def run(self, v2=False, addresses=False):
        changes = {name: buffer.pointer for name, buffer in self.memory.items()} if addresses else {}
        self.call(v2, **changes, workspace=self.workspace())
        return self.outputs()

    def call(self, v2=False, **changes):
        CALLS[self.problem.operation][v2](**(self.v2() if v2 else self.plain()) | changes)

    def workspace(self):
        if self.dtypes is None:
            return self.place.workspace(self.problem, running=self.problem.running, saved=self.problem.saved)
        size = operations_workspace(self)
        self.kept = self.place.device.empty_bytes(size)
        return (self.kept.pointer, self.kept.nbytes) if size else None

    def outputs(self):
        return {OUTPUTS[n]: self.place.get(b) for n, b in self.memory.items() if n in OUTPUTS}

    def judge(self, outputs):
        own = {n: self.dtypes[OPERANDS[n].descriptor] for n in OUTPUTS if n in self.parameters} if self.dtypes else {}
        dtypes = {OUTPUTS[name]: dtype for name, dtype in own.items() if dtype != F32}
        return hold(self.place.handle, self.problem, self.inputs, outputs, dtypes)


def operations_workspace(case):
    """What the operation behind a V2 call of mixed dtypes asks for."""
    p = case.problem
    names = ["alpha", "beta", "epsilon", *(["alpha_param", "beta_param"] if p.operation == BACKWARD else [])]
    options = {name: getattr(p, name) for name in names}
    options |= {OPERANDS[name].name: array for name, array in case._memory().items()}
    options["axis"] = 1 if p.mode == Mode.SPATIAL else tuple(range(1, len(p.dims)))
    if p.operation == TRAIN:
        options["exponential_average_factor"] = p.factor
    return operations.workspace_size(case.place.handle, p.operation.name.lower(), **options)


def refused(case, v2, changes):
    """The argument that is blamed; nothing may have been written."""
    before = case.outputs()
    arguments = (case.v2() if v2 else case.plain()) | changes
    with pytest.raises(ArgumentError) as caught:
        CALLS[case.problem.operation][v2](**arguments)
    for name, after in case.outputs().items():
        assert np.array_equal(after, before[name], equal_nan=True), name
    return caught.value


@pytest.fixture
def place(handle):
    return Place(handle)


def options_of(handle, operation, dtype):
    plain = {}
    blended = {"alpha": 2.0, "beta": -0.5 * blends(handle, dtype)}
    if operation == BACKWARD:
        blended |= {"alpha_param": -1.5, "beta_param": 3.0}
    return plain, blended


@pytest.mark.parametrize("v2", [False, True], ids=["plain", "v2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda v: v.short)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize("operation", CALLS, ids=lambda v: v.name)
def test_calls_are_the_references(place, operation, mode, dtype, layout, v2):
    for options in options_of(place.handle, operation, dtype):
        problem = problem_of(operation, mode, dtype, layout, **options)
        if not executes(place.handle, mode, dtype, layout, (operation,)):
            with pytest.raises(UnsupportedError):
                Case(place, problem).call(v2)  # MIOpen refuses float64 when the parameters are derived
            continue
        case = Case(place, problem)
        case.judge(case.run(v2))
        addressed = Case(place, problem)
        addressed.judge(addressed.run(v2, addresses=True))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_pairs_may_be_absent(place, running, saved):
    for options in ({"running": running, "saved": saved}, {"running": running, "saved": saved, "kappa": 0.0}):
        case = Case(place, problem_of(TRAIN, **options))
        case.judge(case.run())
    case = Case(place, problem_of(BACKWARD, saved=saved))
    case.judge(case.run())


PAIRS = [
    (TRAIN, ("result_running_mean", "result_running_variance")),
    (TRAIN, ("result_save_mean", "result_save_inv_variance")),
    (INFER, ("estimated_mean", "estimated_variance")),
    (BACKWARD, ("saved_mean", "saved_inv_variance")),
]


@pytest.mark.parametrize(("operation", "names"), PAIRS, ids=str)
@pytest.mark.parametrize("null", [None, 0])
@pytest.mark.parametrize("v2", [False, True], ids=["plain", "v2"])
def test_half_a_pair_is_refused_by_name(place, operation, names, null, v2):
    # MIOpen skips the whole pair in silence, or takes statistics from the batch.
    for missing, given in (names, names[::-1]):
        error = refused(Case(place, problem_of(operation)), v2, {missing: null})
        assert (error.argument, error.allowed) == (missing, f"to be given, because {given} is, or both absent")


@pytest.mark.parametrize(("operation", "names"), PAIRS, ids=str)
@pytest.mark.parametrize("v2", [False, True], ids=["plain", "v2"])
def test_half_a_pair_counts_as_none_where_that_is_wanted(place, operation, names, v2):
    """As in MIOpen: the same bits as without both, and the half that is there is neither read nor written."""

    def outputs(*null, **options):
        case = Case(place, problem_of(operation))
        left = {name: place.get(case.memory[name]) for name in names}
        batch = problem_of(BACKWARD, saved=False) if operation == BACKWARD else problem_of(TRAIN)
        arguments = (case.v2() if v2 else case.plain()) | dict.fromkeys(null)
        space = place.workspace(batch, running=False, saved=False)
        CALLS[operation][v2](**arguments, workspace=space, **options)
        assert all(np.array_equal(place.get(case.memory[n]), old, equal_nan=True) for n, old in left.items())
        return case.outputs()

    without = outputs(*names)
    for missing in names:
        found = outputs(missing, strict=False)
        for name, array in found.items():
            if name not in [OUTPUTS.get(n) for n in names]:
                assert np.array_equal(array, without[name], equal_nan=True), name


MIXES = {
    "all f16": (F16, F16, F16, F16),
    "all bf16": (BF16, BF16, BF16, BF16),
    "affine f16": (F16, F16, F32, F32),  # MIOpen's own mix: parameters f16, statistics f32
    "affine bf16": (BF16, BF16, F32, F32),
    "each its own": (BF16, F32, F32, BF16),
    "f16 and bf16": (BF16, F32, F32, F16),
}


def widens(handle, dtypes):
    """Whether the backend computes in every 16-bit dtype among `dtypes`: how parameters are widened and rounded."""
    return all(
        pybnorm.capability(handle.backend, o, Mode.PER_ACTIVATION, d, Layout.CHANNELS_FIRST, 2)[0]
        for d in set(dtypes) - {F32}
        for o in (TRAIN, INFER)
    )


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda v: v.short)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize("operation", CALLS, ids=lambda v: v.name)
def test_v2_takes_parameters_of_other_dtypes(place, operation, mode, dtype, mix):
    dtypes = dict(zip(DESCRIBED[operation], mix, strict=True))
    for options in options_of(place.handle, operation, dtype):
        case = Case(place, problem_of(operation, mode, dtype, **options), dtypes)
        if not widens(place.handle, mix):
            before = case.outputs()
            with pytest.raises(UnsupportedError):
                case.call(v2=True)
            for name, after in case.outputs().items():
                assert np.array_equal(after, before[name], equal_nan=True), name
            continue
        outputs = case.run(v2=True)
        for name, buffer in case.memory.items():
            if name in OUTPUTS and name not in ("y", "dx"):
                assert buffer.dtype == next(dtypes[d] for d, n in DESCRIBED[operation].items() if name in n)
        case.judge(outputs)


# ---------------------------------------------------------------- the newest names

RELU = miopen.ActivationDescriptor(miopen.ActivationMode.RELU)


def space(place):
    """More workspace than a small composed call needs; the CPU keeps its own."""
    if not place.device.stream:
        return None
    place.kept = place.device.empty_bytes(1 << 20)
    return place.kept.pointer, place.kept.nbytes


def from_pair_to_pair(place, case, act, prev=None, following=None, **options):
    """`case` by the call that writes running statistics to a pair of their own; those that were read, and written."""
    arguments = case.v2() | options
    old = [arguments.pop(f"result_running_{n}") for n in ("mean", "variance")]
    prev = old if prev is None else prev
    if following is None:
        following = [place.put(np.full_like(place.get(b), np.nan)) for b in old]
    call = miopen.batch_normalization_forward_training_v3
    if act is not None:
        call, arguments["activ_desc"] = miopen.batch_norm_forward_training_activation_v2, act
    names = [f"{which}_result_running_{n}" for which in ("prev", "next") for n in ("mean", "variance")]
    call(**arguments, **dict(zip(names, (*prev, *following), strict=True)), workspace=space(place))
    return prev, following


@pytest.mark.parametrize("mix", [None, MIXES["each its own"]], ids=["derived", "mixed"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda v: v.short)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
def test_running_statistics_go_from_one_pair_to_another(place, mode, dtype, mix):
    dtypes = mix and dict(zip(DESCRIBED[TRAIN], mix, strict=True))
    if not executes(place.handle, mode, dtype, Layout.CHANNELS_FIRST, (TRAIN,)) or not widens(place.handle, mix or ()):
        pytest.skip(f"{place.handle.backend}: does not compute this, as other tests hold")
    for options in options_of(place.handle, TRAIN, dtype):
        case = Case(place, problem_of(TRAIN, mode, dtype, **options), dtypes)
        prev = [case.memory[f"result_running_{n}"] for n in ("mean", "variance")]
        before = [place.get(b) for b in prev]
        _, following = from_pair_to_pair(place, case, None)
        assert all(np.array_equal(place.get(b), old) for b, old in zip(prev, before, strict=True))
        case.memory |= dict(zip(("result_running_mean", "result_running_variance"), following, strict=True))
        case.judge(case.outputs())


@pytest.mark.parametrize("act", [None, RELU, miopen.ActivationDescriptor(miopen.ActivationMode.CLIPPEDRELU, 0.5)])
def test_the_same_pair_is_updated_in_place_and_an_activation_follows(place, act):
    want = Case(place, problem_of(TRAIN))
    want.judge(want.run(v2=True))
    case, other = Case(place, problem_of(TRAIN)), Case(place, problem_of(TRAIN))
    pair = [case.memory[f"result_running_{n}"] for n in ("mean", "variance")]
    from_pair_to_pair(place, case, act, pair, pair)
    _, following = from_pair_to_pair(place, other, act)
    y = place.get(want.memory["y"])
    if act is not None:
        y = np.clip(y, 0, act.alpha or np.inf)
    for mine, written in ((case, pair), (other, following)):
        assert np.allclose(place.get(mine.memory["y"]), y, atol=1e-5)
        for name, buffer in zip(("mean", "variance"), written, strict=True):
            expected = place.get(want.memory[f"result_running_{name}"])
            assert np.allclose(place.get(buffer), expected, rtol=1e-5), name


def test_what_is_no_pair_of_pairs_is_refused_by_name(place):
    case = Case(place, problem_of(TRAIN))
    mean, variance = (case.memory[f"result_running_{n}"] for n in ("mean", "variance"))
    for prev, following, name in (
        ((mean, None), (mean, variance), "prev_result_running_variance"),
        ((mean, variance), (None, None), "next_result_running_mean"),
        ((variance, mean), (mean, variance), "_result_running_"),
    ):
        with pytest.raises(ArgumentError) as caught:
            from_pair_to_pair(place, case, None, prev, following)
        assert name in caught.value.argument
    absent = from_pair_to_pair(place, case, None, (mean, None), (mean, variance), strict=False)[1]
    assert all(np.isfinite(place.get(b)).all() for b in absent)


def by_inverse(arguments):
    """The arguments of a V2 inference by the names of the one that takes inverse standard deviations."""
    names = {"est_variance_desc": "est_inv_variance_desc", "estimated_variance": "estimated_inv_variance"}
    return {names.get(n, n): v for n, v in arguments.items() if n != "epsilon"}


@pytest.mark.parametrize("act", [None, RELU])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda v: v.short)
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
def test_inference_takes_an_inverse_standard_deviation(place, mode, dtype, act):
    if not executes(place.handle, mode, dtype, Layout.CHANNELS_FIRST, (INFER,)):
        pytest.skip(f"{place.handle.backend}: does not compute this, as other tests hold")
    for options in options_of(place.handle, INFER, dtype):
        problem = problem_of(INFER, mode, dtype, inverse=True, **(options if act is None else {}))
        case = Case(place, problem)
        arguments, inputs = by_inverse(case.v2()), case.inputs
        arguments["estimated_mean"] = place.put(inputs.saved_mean)
        arguments["estimated_inv_variance"] = place.put(inputs.saved_inv_variance)
        call = miopen.batch_normalization_forward_inference_inv_variance
        if act is not None:
            plain = call(**arguments, workspace=space(place)) or place.get(case.memory["y"])
            call = miopen.batch_norm_forward_inference_activation_inv_variance
            call(**arguments, activ_desc=act, workspace=space(place))
            assert np.array_equal(place.get(case.memory["y"]), np.maximum(plain, plain.dtype.type(0)))
            continue
        call(**arguments, workspace=space(place))
        hold(place.handle, problem, case.inputs, {"y": place.get(case.memory["y"])})


@pytest.mark.parametrize("null", [None, 0])
@pytest.mark.parametrize("mode", MODES, ids=lambda v: v.name)
@pytest.mark.parametrize("form", ["plain", "v2", "bf16", "inverse"])
def test_inference_without_estimates_takes_the_batchs(place, mode, null, form):
    blend = {"eps": 1e-5} if form in ("bf16", "inverse") else {"alpha": 1.5, "beta": 0.5}
    dtypes = dict(zip(DESCRIBED[INFER], MIXES["affine bf16"], strict=True)) if form == "bf16" else None
    case = Case(place, problem_of(INFER, mode, **blend), dtypes)
    estimates = [case.memory[n] for n in ("estimated_mean", "estimated_variance")]
    before = [place.get(b) for b in estimates]
    arguments = case.plain() if form == "plain" else case.v2()
    arguments |= {"estimated_mean": null, "estimated_variance": null}
    call = CALLS[INFER][form != "plain"]
    if form == "inverse":
        call, arguments = miopen.batch_normalization_forward_inference_inv_variance, by_inverse(arguments)
    call(**arguments, workspace=space(place))
    inputs = dataclasses.replace(case.inputs, mean=None, variance=None)
    training = problem_of(TRAIN, mode, running=False, saved=False, **blend)
    hold(place.handle, training, inputs, {"y": place.get(case.memory["y"])})
    assert all(np.array_equal(place.get(b), old) for b, old in zip(estimates, before, strict=True))


# ---------------------------------------------------------------- derive, the factor


@pytest.mark.parametrize("mode", [*MODES, 0, 1, "spatial", "per_activation"], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: v.name)
def test_derive_needs_no_device(backend, mode, layout):
    strides = problem_of(TRAIN, layout=layout).strides
    derived = miopen.derive_bn_tensor_descriptor(pybnorm.TensorDescriptor(backend, "f16", SHAPE, strides), mode)
    kept = mode in (Mode.PER_ACTIVATION, "per_activation")
    assert derived.dims == ((1, *SHAPE[1:]) if kept else (1, SHAPE[1], 1, 1))
    assert (derived.dtype, derived.layout, derived.backend) == (F32, Layout.CHANNELS_FIRST, backend)


def test_derive_takes_other_ranks_and_refuses_other_modes(backend):
    for dims in ((4, 3), (4, 3, 5), (4, 3, 2, 2, 2, 2)):  # MIOpen does not take them
        derived = miopen.derive_bn_tensor_descriptor(pybnorm.TensorDescriptor(backend, "f32", dims), Mode.SPATIAL)
        assert derived.dims == (1, 3, *[1] * (len(dims) - 2))
    described, closed = (pybnorm.TensorDescriptor(backend, "f32", SHAPE) for _ in range(2))
    closed.close()
    for x_desc, mode, kind, argument in [
        *[(described, mode, ArgumentError, "bn_mode") for mode in (2, 3, -1, None, True, "other")],  # MIOpen takes 2
        (described, Mode.SPATIAL_PERSISTENT, ArgumentError, "bn_mode"),
        (SHAPE, Mode.SPATIAL, ArgumentTypeError, "x_desc"),
        (closed, Mode.SPATIAL, ClosedError, "x_desc"),
    ]:
        with pytest.raises(kind, match=rf"^{argument}: "):
            miopen.derive_bn_tensor_descriptor(x_desc, mode)


def test_the_cumulative_factor_weights_all_batches_alike():
    values = np.random.default_rng(3).normal(size=50)
    running = np.inf  # replaced by the first, not blended with
    for n, value in enumerate(values):
        factor = miopen.cumulative_average_factor(n)
        running = (0.0 if factor == 1.0 else (1 - factor) * running) + factor * value
    assert abs(running - values.mean()) < 50 * 2.0**-52
    assert miopen.cumulative_average_factor(np.int64(3)) == 0.25
    assert type(miopen.cumulative_average_factor(np.int64(3))) is float
    for bad in (-1, 1.5, None):
        with pytest.raises(ArgumentError, match=r"^n: "):
            miopen.cumulative_average_factor(bad)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("v2", [False, True], ids=["plain", "v2"])
@pytest.mark.parametrize("operation", CALLS, ids=lambda v: v.name)
def test_bad_scalars_are_refused_by_miopens_name(place, operation, v2):
    case = Case(place, problem_of(operation))
    blend = [n for n in case.options if n.startswith(("alpha", "beta"))]
    assert len(blend) == (4 if operation == BACKWARD else 2)
    bad = [(n, v) for n in blend for v in (float("nan"), float("inf"), 1e39, "one", None)]
    bad += [("epsilon", v) for v in (-1e-9, float("nan"), None)]
    bad += [("bn_mode", v) for v in (Mode.SPATIAL_PERSISTENT, 2, 7, None)]
    bad += [("handle", v) for v in (None, 0, place.handle.pointer)]
    bad += [("exp_avg_factor", v) for v in (-0.1, 1.1, float("nan"), "f")] if operation == TRAIN else []
    bad += [("workspace", v) for v in ("none", (0, 64))]
    for name, value in bad:
        assert refused(case, v2, {name: value}).argument == name, (name, value)


@pytest.mark.parametrize("v2", [False, True], ids=["plain", "v2"])
@pytest.mark.parametrize("operation", CALLS, ids=lambda v: v.name)
def test_bad_descriptors_are_refused_by_name(place, operation, v2):
    case = Case(place, problem_of(operation))
    names = [n for n in (case.v2() if v2 else case.plain()) if n.endswith("_desc")]
    assert len(names) == (4 if v2 else 1) + (3 if operation == BACKWARD else 2)
    closed = pybnorm.TensorDescriptor(place.handle.backend, "f32", SHAPE)
    closed.close()
    for name in names:
        for wrong in (None, 3, closed):
            assert refused(case, v2, {name: wrong}).argument == name
        # Another shape, with memory that lies that way: the argument it describes is to blame.
        other = pybnorm.TensorDescriptor(place.handle.backend, "f32", (2, 2, 2, 2))
        arguments = case.v2() if v2 else case.plain()
        addresses = {n: arguments[n].pointer for n in case.memory}
        blamed = refused(case, v2, addresses | {name: other}).argument
        assert blamed in {**case.memory}, (name, blamed)


@pytest.mark.parametrize("v2", [False, True], ids=["plain", "v2"])
@pytest.mark.parametrize("operation", CALLS, ids=lambda v: v.name)
def test_bad_memory_is_refused_by_miopens_name(place, operation, v2):
    case = Case(place, problem_of(operation))
    optional = {n for n in case.memory if re.match(r"saved|estimated|result_(running|save)", n)}
    assert len(optional) == {TRAIN: 4, INFER: 2, BACKWARD: 2}[operation]
    for name in case.memory:
        bad = ["array", True, False, -1, 2**64, np.zeros((2, 2), np.float32), np.zeros(SHAPE, np.int32)]
        bad += [np.zeros(case.memory[name].dims, np.float64)]
        if name not in optional:
            bad += [None, 0]  # dscale and dbias too, which MIOpen does not look at
        for value in bad:
            assert refused(case, v2, {name: value}).argument == name, (name, value)
        if name in OUTPUTS and place.device.device_type == 1:
            locked = np.zeros(case.memory[name].dims, np.float32)
            locked.flags.writeable = False
            assert refused(case, v2, {name: locked}).argument == name
            if v2 and name not in {"y", "dx"}:  # and where parameters are of mixed dtypes
                mixed = Case(place, problem_of(operation), dict.fromkeys(DESCRIBED[operation], BF16))
                locked = np.zeros(case.memory[name].dims, data.numpy_dtype(BF16))
                locked.flags.writeable = False
                assert refused(mixed, v2, {name: locked}).argument == name


@pytest.mark.parametrize("operation", CALLS, ids=lambda v: v.name)
def test_shared_memory_is_refused_in_miopens_words(place, operation):
    case = Case(place, problem_of(operation))
    for name in case.memory:
        if name in OUTPUTS and name not in ("y", "dx"):
            error = refused(case, False, {name: case.memory["bn_scale"]})
            assert {error.argument, *re.findall(r"\w+$", error.allowed)} == {name, "bn_scale"}
    if operation == TRAIN:  # False is no NULL
        both = dict.fromkeys(("result_running_mean", "result_running_variance"), False)
        assert refused(case, False, both).argument == "result_running_mean"


def test_unlike_data_is_refused_by_name(place):
    case = Case(place, problem_of(TRAIN))
    half = pybnorm.TensorDescriptor(place.handle.backend, "bf16", SHAPE)
    error = refused(case, True, {"y_desc": half, "y": case.memory["y"].pointer})
    assert (error.argument, type(error)) == ("y", ArgumentTypeError)
    last = problem_of(TRAIN, layout=Layout.CHANNELS_LAST).strides
    moved = pybnorm.TensorDescriptor(place.handle.backend, "f32", SHAPE, last)
    assert refused(case, False, {"x_desc": moved}).argument == "x"  # the array does not lie so


def test_a_closed_handle_and_a_foreign_descriptor_are_named(place):
    case = Case(place, problem_of(INFER))
    with pybnorm.Handle(place.handle.backend) as closed:
        pass
    error = refused(case, False, {"handle": closed})
    assert (error.argument, type(error)) == ("handle", ClosedError)
    for backend in pybnorm.backends():
        try:
            foreign = pybnorm.TensorDescriptor(backend, "f32", SHAPE)
        except pybnorm.LibraryError:
            continue
        if backend != place.handle.backend:
            assert refused(case, False, {"x_desc": foreign}).argument == "x_desc"
