"""A case as a command of the vendors' own tools, to paste into a vendor's ticket.

None of the tools takes our data, and two of them take neither epsilon nor the factor: a line makes the same call on the
same shapes, but on other values. There is no line for a call that a tool cannot make.

MIOpenDriver: ``driver/bn_driver.hpp`` and ``driver.hpp`` of MIOpen 3.3; epsilon is 1e-3 and the factor 1/(i+1) always.
benchdnn: ``tests/benchdnn/bnorm`` of oneDNN 3.x; backward takes the statistics of its own forward pass, or with G given
ones as constants, which is ``frozen``; running statistics do not exist. cuDNN: the legacy call.
"""

from __future__ import annotations

import itertools
import math

from pybnorm.check.language import calls
from pybnorm.check.language.problem import Problem, checked
from pybnorm.enums import Activation, DataType, Layout, Mode, Operation
from pybnorm.errors import ArgumentError

_MIOPEN_NAMES = {DataType.FLOAT32: "bnorm", DataType.FLOAT16: "bnormfp16", DataType.BFLOAT16: "bnormbfp16"}
_CUDNN_TYPES = {DataType.FLOAT32: "FLOAT", DataType.FLOAT64: "DOUBLE", DataType.FLOAT16: "HALF"}
_NULL = ["NULL", "NULL"]


def _plain(problem: Problem, *composed: str) -> bool:
    """Say whether nothing is blended and parameters have the dtype that every library takes."""
    scalars = (problem.alpha, problem.beta, problem.alpha_param, problem.beta_param)
    given = problem.inverse or problem.composed not in ("", *composed)
    return not given and scalars == (1, 0, 1, 0) and problem.parameter_dtype == problem.default_params


def miopen_driver(problem: Problem) -> str | None:
    """The ``MIOpenDriver`` command, or None: float64, strides, rank above 5, blending and persistent have none."""
    checked(problem)
    rank = len(problem.dims)
    lacks = problem.dtype not in _MIOPEN_NAMES or problem.layout == Layout.STRIDED or problem.inplace or rank > 5
    if lacks or problem.activation or problem.mode == Mode.SPATIAL_PERSISTENT or not _plain(problem):
        return None
    n, c, *spatial = problem.dims
    words = ["MIOpenDriver", _MIOPEN_NAMES[problem.dtype], f"-n {n} -c {c}"]
    if rank == 5:
        words.append(f"-D {spatial.pop(0)}")
    height, width = (*spatial, 1, 1)[:2]
    words.append(f"-H {height} -W {width}")
    words.append(f"-m {int(problem.mode == Mode.SPATIAL)}")
    if problem.operation == Operation.FORWARD_TRAINING:
        words.append(f"-F 1 -r {int(problem.running)} -s {int(problem.saved)}")
    elif problem.operation == Operation.FORWARD_INFERENCE:
        words.append("-F 2 -r 1")  # without -r it takes the statistics of the batch
    else:
        words.append(f"-F 0 -b 1 -s {int(problem.saved)}")
    if problem.layout == Layout.CHANNELS_LAST:
        words.append("-L " + ("NDHWC" if rank == 5 else "NHWC"))
    return " ".join(words)


def benchdnn(problem: Problem) -> str | None:
    """The ``benchdnn`` command, or None: float64, rank above 5, blending and modes but spatial have none."""
    checked(problem)
    rank = len(problem.dims)
    if not _plain(problem, "frozen") or problem.dtype == DataType.FLOAT64 or problem.mode != Mode.SPATIAL or rank > 5:
        return None
    if problem.activation not in (Activation.NONE, Activation.RELU):
        return None
    call = {
        Operation.FORWARD_TRAINING: "FWD_D --flags=CH",
        Operation.FORWARD_INFERENCE: "FWD_I --flags=GCH",
        Operation.BACKWARD: f"BWD_DW --flags={'G' if problem.composed else ''}CH",
    }[problem.operation]
    fused = ("A" if problem.residual else "R") if problem.activation else ""
    words = ["benchdnn", "--bnorm", f"--dir={call}{fused}", f"--dt={problem.dtype.short}"]
    if problem.layout == Layout.CHANNELS_LAST:
        words.append("--tag=axb")
    elif problem.layout == Layout.STRIDED:
        strides = "x".join(map(str, problem.strides))
        words.append(f"--strides={strides}:{strides}")
    if problem.inplace:
        words.append("--inplace=true")
    n, c, *spatial = problem.dims
    sizes = zip(("id", "ih", "iw")[3 - len(spatial) :], spatial, strict=True)
    epsilon = "" if problem.epsilon == 0.0625 else f"eps{problem.epsilon!r}"
    words.append(f"mb{n}ic{c}" + "".join(f"{name}{size}" for name, size in sizes) + epsilon)
    return " ".join(words)


def cudnn_call(problem: Problem) -> str | None:
    """The legacy cuDNN call as C, or None where pybnorm would refuse to make it."""
    checked(problem)
    folded, activated = _fold(problem), bool(problem.activation)
    if folded is None or problem.inverse or problem.composed or problem.parameter_dtype != problem.default_params:
        return None
    if activated and (problem.activation != Activation.RELU or problem.operation == Operation.FORWARD_INFERENCE):
        return None
    overwritten, scalar = calls.overwritten(problem), "double" if problem.dtype == DataType.FLOAT64 else "float"

    def data(name: str) -> list[str]:
        return [f"{name}Desc", overwritten.get(name, name)]

    def added(name: str) -> list[str]:
        return [] if not activated else data(name) if problem.residual else _NULL

    blend = [problem.alpha, problem.beta]
    saved = ["savedMean", "savedInvVariance"] if problem.saved else _NULL
    if problem.operation == Operation.FORWARD_TRAINING:
        name = "ForwardTraining"
        running = ["runningMean", "runningVariance"] if problem.running else _NULL
        words = [*data("x"), *added("z"), *data("y"), "bnDesc", "scale", "bias", repr(problem.factor), *running]
        words += [repr(problem.epsilon), *saved]
    elif problem.operation == Operation.FORWARD_INFERENCE:
        name = "ForwardInference"
        words = [*data("x"), *data("y"), "bnDesc", "scale", "bias", "estimatedMean", "estimatedVariance"]
        words.append(repr(problem.epsilon))
    else:
        name = "Backward"
        blend += [problem.alpha_param, problem.beta_param]
        words = [*data("x"), *(data("y") if activated else ()), *data("dy"), *added("dz"), *data("dx"), "bnDesc"]
        words += ["scale", *["bias"] * activated, "dscale", "dbias", repr(problem.epsilon), *saved]
    mode = f"CUDNN_BATCHNORM_{problem.mode.name}"
    of_data = ", ".join(word for word in words if word.endswith("Desc") and word != "bnDesc")
    if activated:
        name, mode = f"{name}Ex", f"{mode}, CUDNN_BATCHNORM_OPS_BN_{'ADD_' if problem.residual else ''}ACTIVATION"
        words += ["reluDesc", "workspace", "workspaceSize", "reserve", "reserveSize"]
    dims, strides, vector = folded
    kind, parameters = (
        f"CUDNN_DATA_{_CUDNN_TYPES.get(dtype, dtype.name)}" for dtype in (problem.dtype, problem.parameter_dtype)
    )
    pointers = [f"&({scalar}){{{value!r}}}" for value in blend]
    return (
        f"cudnnBatchNormalization{name}(handle, {', '.join([mode, *pointers, *words])}); "
        f"/* {of_data}: {kind} dims {dims} strides {strides}; bnDesc: {parameters} dims {vector} */"
    )


def vendor_lines(problem: Problem) -> dict[str, str]:
    """Every line that exists for `problem`, by the name of the tool or library."""
    lines = {"MIOpenDriver": miopen_driver(problem), "benchdnn": benchdnn(problem), "cuDNN": cudnn_call(problem)}
    return {name: line for name, line in lines.items() if line is not None}


def of_case(case: str) -> dict[str, str]:
    """`vendor_lines` of a problem's line; empty if the line is of another version's language."""
    try:
        return vendor_lines(Problem.parse(case))
    except ArgumentError:
        return {}


def _fold(problem: Problem) -> list[str] | None:
    """Dims, strides and the dims of a parameter at the rank 4 or 5 that cuDNN computes at; None if it cannot."""
    dims, strides = problem.dims, problem.strides
    unit = dims[1] if problem.layout == Layout.CHANNELS_LAST else 1  # stride of an axis of length 1
    if len(dims) > 5:
        axes = [axis for axis in zip(dims[2:], strides[2:], strict=True) if axis[0] > 1] or [(1, unit)]
        if any(outer != size * stride for (_, outer), (size, stride) in itertools.pairwise(axes)):
            return None
        dims, strides = (*dims[:2], math.prod(dims[2:])), (*strides[:2], axes[-1][1])
    missing = max(0, 4 - len(dims))
    dims, strides = dims + (1,) * missing, strides + (unit,) * missing
    spatial = dims[2:] if problem.mode == Mode.PER_ACTIVATION else (1,) * (len(dims) - 2)
    return ["x".join(map(str, sizes)) for sizes in (dims, strides, (1, dims[1], *spatial))]
