"""The judge without a library: the arguments of a problem's call, and the verdict on arrays that came of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import as_buffer, numpy_dtype
from pybnorm.check.judging.bounds import Status, Verdict, expect
from pybnorm.check.judging.bounds.trust import blind_inputs
from pybnorm.check.judging.results import CaseResult
from pybnorm.check.judging.whole_call import judge_call
from pybnorm.check.language import calls
from pybnorm.check.language.data import Inputs, generate
from pybnorm.check.language.problem import MODES, Problem, checked
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.reference.namespaces import Array

_WORDS = {mode: word for word, mode in MODES.items()}


def arguments(problem: Problem | str) -> dict[str, Any]:
    """The arguments of a problem's call, as an implementation gets them (`pybnorm.check.run.implementations`).

    Parameters
    ----------
    problem : Problem or str
        A case, or its line.

    Returns
    -------
    dict
        NumPy arrays, new at each call, with the dims, strides and dtype of the case, and the options. Results hold
        their values before the call: running statistics, the prior of an output that has one, else NaN.

    Raises
    ------
    ArgumentError
        As `Problem.parse`.

    Examples
    --------
    >>> found = pybnorm.check.arguments("train,spatial,f32,nchw,8x3x4x4,saved=0")
    >>> [name for name in found if name.isalpha()]
    ['x', 'scale', 'bias', 'y', 'mode', 'epsilon', 'alpha', 'beta']
    >>> found["x"].shape, found["running_mean"].shape, found["mode"], found["epsilon"]
    ((8, 3, 4, 4), (1, 3, 1, 1), 'spatial', 0.0625)
    """
    case = _problem(problem)
    inputs = generate(case)
    found: dict[str, Any] = {}
    for tensor in calls.tensors(case):
        same = calls.overwritten(case).get(tensor.name)
        if same is not None:
            found[tensor.name] = found[same]
            continue
        dims, dtype = calls.kind(case, tensor)
        strides = case.strides if tensor.data else _arguments.packed_strides(dims)
        memory = np.full(_arguments.span(dims, strides), np.nan, numpy_dtype(dtype))
        array = np.ndarray(dims, memory.dtype, memory, strides=tuple(s * dtype.itemsize for s in strides))
        values = getattr(inputs, tensor.values) if tensor.values else None
        array[...] = np.nan if values is None else values
        found[tensor.name] = array
    return found | words(calls.options(case))


def words(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the command line's words in place of enumerations."""
    found = dict(options)
    if "mode" in found:
        found["mode"] = _WORDS[found["mode"]]
    if "activation" in found:
        found["activation"] = found["activation"].name.lower()
    return found


def judge(problem: Problem | str, outputs: dict[str, Any]) -> CaseResult:
    """The verdict on what a kernel made of `arguments`, wherever it ran.

    Parameters
    ----------
    problem : Problem or str
        A case, or its line.
    outputs : dict of str to array
        All results of the case by name: NumPy, PyTorch, CuPy or JAX arrays on any device, of the case's dtype and dims;
        statistics may be without the axes of length 1.

    Returns
    -------
    CaseResult
        ``status`` and ``message`` of the case, and ``verdicts``: for each output its ``output``, ``status``, largest
        ``ratio`` of error to bound, ``tier`` (the class that holds it), ``note``, ``worst`` points, and ``noticed``,
        the smallest relative error that would have been a FAIL.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `Problem.parse`; an output is missing, unknown, no array, or of another dtype or shape.

    Examples
    --------
    >>> line = "infer,spatial,f32,nchw,8x3x4x4,fill=randn"
    >>> given = pybnorm.check.arguments(line)
    >>> inverse = 1 / np.sqrt(given["running_variance"] + np.float32(given["epsilon"]))
    >>> y = given["scale"] * (given["x"] - given["running_mean"]) * inverse + given["bias"]
    >>> result = pybnorm.check.judge(line, {"y": y})
    >>> result.status.name, [(v.output, v.status.name, v.ratio < 1) for v in result.verdicts]
    ('PASS', [('y', 'PASS', True)])
    >>> pybnorm.check.judge(line, {"y": 1.001 * y}).status.name
    'FAIL'
    """
    case = _problem(problem)
    if not issubclass(type(outputs), dict):
        raise ArgumentTypeError("outputs", type(outputs).__name__, "a dict of names and arrays")
    given = dict(dict.items(outputs))
    needed = {tensor.name: tensor for tensor in calls.outputs(case)}
    if wrong := [name for name in given if not isinstance(name, str) or name not in needed]:
        raise ArgumentError("outputs", wrong[0], f"{', '.join(needed)}, and no others")
    if missing := [name for name in needed if name not in given]:
        raise ArgumentError("outputs", f"none named {' and '.join(missing)}", f"all of {', '.join(needed)}")
    arrays = {}
    for name, tensor in needed.items():
        (dims, dtype), argument = calls.kind(case, tensor), f"outputs[{name!r}]"
        if different := mismatch(tensor, dims, dtype.name.lower(), given[name]):
            kind = ArgumentTypeError if " of type " in different else ArgumentError
            got = different.partition(", not ")[0].removeprefix("is of ").removeprefix("has the ")
            raise kind(argument, got, f"{dtype.name.lower()}, {'x'.join(map(str, dims))}")
        arrays[name] = as_numpy(argument, given[name]).astype(numpy_dtype(dtype), copy=False).reshape(dims)
    result = CaseResult("", str(case), Status.PASS)
    inputs = generate(case)
    settle(result, case, inputs, judge_call(expect(case, inputs), arrays))
    return result


def settle(result: CaseResult, problem: Problem, inputs: Inputs, verdicts: Mapping[str, Verdict]) -> None:
    """Give a result its verdicts, and the status that follows: the worst, or MISTRUSTED if none could have failed."""
    result.verdicts = list(verdicts.values())
    result.status = max((v.status for v in result.verdicts), key=lambda s: s.severity)
    if result.status.correct:
        blind = blind_inputs(problem, inputs, one_pass=result.status != Status.PASS)
        if blind:
            result.status = Status.MISTRUSTED
            result.message = "a change would not be noticed of: " + ", ".join(blind)


def mismatch(tensor: calls.Tensor, dims: tuple[int, ...], dtype: str, value: Any) -> str:
    """Say how an array's type, dtype or shape differs from what the tensor of a call has; empty if it does not."""
    try:
        shape, word = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    except Exception:
        return f"is of type {type(value).__name__}, not an array"
    if word != dtype:
        return f"is of dtype {word}, not {dtype}"
    if shape == dims or (not tensor.data and [d for d in shape if d != 1] == [d for d in dims if d != 1]):
        return ""
    got, needed = ("x".join(map(str, d)) or "()" for d in (shape, dims))
    return f"has the shape {got}, not {needed}"


def _problem(problem: Problem | str) -> Problem:
    if issubclass(type(problem), str):
        return Problem.parse(problem)  # type: ignore[arg-type]
    checked(problem)
    return problem  # type: ignore[return-value]


def as_numpy(argument: str, value: Any) -> Array:
    """An array of any framework, on any device, as NumPy's; `argument` is named where it is none or cannot be read."""
    import array_api_compat  # beside NumPy's own arrays only

    kind = type(value).__name__
    try:
        if array_api_compat.is_torch_array(value):
            value, torch = value.detach().cpu(), sys.modules["torch"]
            if value.dtype == torch.bfloat16:
                value = value.view(torch.int16).numpy().view(numpy_dtype(DataType.BFLOAT16))
        elif array_api_compat.is_cupy_array(value):
            value = value.get()
        else:
            as_buffer(value, argument)
        return np.asarray(value)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentTypeError(argument, kind, f"an array that NumPy can read ({error})") from None
