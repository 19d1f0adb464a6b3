"""The vendor call that a problem asks for: its method, its tensors and its options, from one table each."""

from __future__ import annotations

from typing import Any, NamedTuple

from pybnorm import _core
from pybnorm.check.language.problem import LIMITS, OPERATIONS, OPTIONS, Problem, vector_dtype
from pybnorm.enums import DataType, Mode, Operation

METHODS = {operation: operation.name.lower() for operation in OPERATIONS.values()}
"""Of `pybnorm.Handle`."""


class Tensor(NamedTuple):
    """A tensor of a call, by the name of its argument."""

    name: str
    data: bool
    """Whether it has the shape of x; else that of scale."""
    written: bool
    values: str
    """The field of `pybnorm.check.language.data.Inputs` with its values before the call; empty if it has none."""
    when: str
    """What the call must have for it: "always", or the field of a problem that says so."""


_READ = {"running_mean": "mean", "running_variance": "variance"}
"""Fields of tensors that are read, where they have another name."""
_WRITTEN = {"y": "prior", "dx": "prior", "dscale": "prior_scale", "dbias": "prior_bias"} | _READ
"""Fields with what a written tensor holds before the call, where it is read then."""
_INVERSE = {"running_mean": "saved_mean", "running_variance": "saved_inv_variance"}
"""Fields of the statistics of inference from the inverse standard deviation."""
_PLAIN = ("always", "running", "saved")
"""Of the core's conditions, those of calls without an activation."""


def _tensor(name: str, data: bool, written: bool, when: str, field: str = "") -> Tensor:
    """A tensor with the field that its values come from."""
    field = field or (_WRITTEN.get(name, "") if written else _READ.get(name, name))
    return Tensor(name, data, written, field, when)


EVERY = {
    operation: tuple(
        _tensor(row.name, not row.vector, row.written, row.when)
        for row in _core.tensors(operation)
        if row.when != "constant"  # of `frozen`
    )
    for operation in METHODS
}
"""Tensors of each operation."""
TENSORS = {operation: tuple(t for t in rows if t.when in _PLAIN) for operation, rows in EVERY.items()}
"""Tensors of each operation without an activation, in the order of the method's arguments."""
_BLENDS = ("alpha", "beta", "alpha_param", "beta_param")
_KEYWORDS = {"epsilon": "eps"} | {name: name for name in _BLENDS} | {"exponential_average_factor": "factor"}
"""Keywords of calls, with the field of a problem that has the value."""


def _keywords(word: str, *others: str) -> dict[str, str]:
    """The keywords of the call of an operation."""
    own = {keyword: field for keyword, field in _KEYWORDS.items() if field in OPTIONS[word]}
    return {name: name for name in others} | own


class Call(NamedTuple):
    """A method of `pybnorm.Handle` or a function of `pybnorm.operations`."""

    name: str
    tensors: tuple[Tensor, ...]
    options: dict[str, str]
    """Keywords, with the fields of a problem that have their values."""


_DATA = ("x", "dy", "y", "dx", "means", "m2s")


def _composed(word: str, name: str, read: str, written: str, *others: str) -> Call:
    """One row: tensors as ``name`` or ``name=field``, and keywords that no option of a line has."""
    rows = [(*pair.partition("=")[::2], pairs is written) for pairs in (read, written) for pair in pairs.split()]
    tensors = [
        _tensor(tensor, tensor in _DATA, result, "running" if tensor.startswith("running") else "always", field)
        for tensor, field, result in rows
    ]
    return Call(name, tuple(tensors), _keywords(word, *others))


_GIVEN = "mean=saved_mean inv_variance=saved_inv_variance"
_FROZEN = "x dy scale mean variance", "dx dscale dbias"
_GATHERED = "mean variance inv_variance running_mean running_variance"
_TRAINED = "y running_mean running_variance saved_mean saved_inv_variance"
COMPOSED = {
    word: _composed(word, *row)
    for word, *row in (
        ("frozen", "backward_frozen", *_FROZEN),
        ("training_grad", "training_grad", *_FROZEN),
        ("backward_reduce", "backward_reduce", f"x dy {_GIVEN}", "sum_dy sum_dy_xmu dscale dbias"),
        ("backward_elemt", "backward_elemt", f"x dy scale {_GIVEN} sum_dy sum_dy_xmu", "dx", "count"),
        ("elemt", "elemt", f"x scale bias {_GIVEN}", "y"),
        ("gather_stats", "gather_stats", "means=x m2s", _GATHERED, "counts"),
        ("sync_train", "sync_train", "x scale bias", _TRAINED, "shares"),
        ("sync_backward", "sync_backward", "x dy scale saved_mean saved_inv_variance", "dx dscale dbias", "shares"),
    )
}
"""The call of each composed operation."""
CALLS = {w: Call(METHODS[o], EVERY[o], _keywords(w, "mode")) for w, o in OPERATIONS.items()} | COMPOSED
"""The call of each word of a line."""
_WORKSPACE = ("mode", *_BLENDS, "epsilon", "running", "saved")


def tensors(problem: Problem) -> list[Tensor]:
    """The tensors that the call of `problem` is given."""
    has = {"always": True, "running": problem.running, "saved": problem.saved, "residual": problem.residual}
    has |= {"activation": bool(problem.activation), "mask": problem.masked}
    found = [tensor for tensor in CALLS[problem.word].tensors if has[tensor.when]]
    if problem.inverse and not problem.composed:
        return [tensor._replace(values=_INVERSE.get(tensor.name, tensor.values)) for tensor in found]
    return found


def around(problem: Problem) -> list[Tensor]:
    """List the call's tensors, and the optional ones that it is not given and must not write to."""
    if problem.composed:
        return list(COMPOSED[problem.composed].tensors)
    seen = {tensor.name: tensor for tensor in (*TENSORS[problem.operation], *tensors(problem))}
    return [seen[tensor.name] for tensor in EVERY[problem.operation] if tensor.name in seen]


def outputs(problem: Problem) -> list[Tensor]:
    """List the tensors that the call of `problem` writes."""
    return [tensor for tensor in tensors(problem) if tensor.written]


def kind(problem: Problem, tensor: Tensor) -> tuple[tuple[int, ...], DataType]:
    """Dims and dtype of a tensor of `problem`."""
    if tensor.data:
        return problem.dims, problem.dtype
    return problem.parameter_dims, vector_dtype(problem, tensor.values or tensor.name)


def overwritten(problem: Problem) -> dict[str, str]:
    """Outputs of `problem` that have the memory of an input, and which."""
    if not problem.inplace:
        return {}
    return {"dx": "dy"} if problem.operation == Operation.BACKWARD else {"y": "x"}


def method(problem: Problem) -> str:
    """Name of the call: a method of `pybnorm.Handle`, or a function of `pybnorm.operations`."""
    return CALLS[problem.word].name


def axis(problem: Problem) -> int | tuple[int, ...]:
    """The axes that parameters keep."""
    return 1 if problem.mode != Mode.PER_ACTIVATION else tuple(range(1, len(problem.dims)))


def options(problem: Problem) -> dict[str, Any]:
    """The keywords of the call of `problem`, but for tensors and workspace."""
    found = {keyword: getattr(problem, name) for keyword, name in CALLS[problem.word].options.items()}
    if problem.composed:
        return found if "counts" in found else found | {"axis": axis(problem)}
    return found | _algorithm(problem) | activation_options(problem)


def stated(problem: Problem) -> dict[str, bool]:
    """The keywords of a plan that say which statistics the call of `problem` has."""
    return {name: getattr(problem, name) for name in ("running", "saved") if name in problem.options}


def activation_options(problem: Problem) -> dict[str, Any]:
    """The activation as `pybnorm.Handle` takes it."""
    limits = {f"activation_{n}": getattr(problem, n) for n, kinds in LIMITS.items() if problem.activation in kinds}
    return {"activation": problem.activation} | limits if problem.activation else {}


def workspace_options(problem: Problem) -> dict[str, Any]:
    """The keywords of `pybnorm.Handle.workspace_size` for the call of `problem`."""
    return {name: getattr(problem, name) for name in _WORKSPACE} | _algorithm(problem)


def _algorithm(problem: Problem) -> dict[str, str]:
    return {"algorithm": problem.algorithm} if problem.algorithm else {}
