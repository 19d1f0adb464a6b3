"""Kernels with the signatures of PyTorch's operators: ``pybnorm check --implementation aten:MODULE``.

MODULE is a module, a file, or an object of one, such as ``my_kernels.py``, ``flag_gems.ops`` or ``torch.ops.aten``. It
has some of these functions, with the arguments of ATen's, by position; the first of each row that it has is called:

* training and inference: ``native_batch_norm``, ``_native_batch_norm_legit``, ``cudnn_batch_norm``,
  ``miopen_batch_norm``, ``_batch_norm_impl_index``, ``batch_norm``, ``_native_batch_norm_legit_functional``. In place
  of a tuple, ``batch_norm`` may return the result alone, and then declares ``outputs``.
* training ``_batch_norm_with_update``; inference ``_native_batch_norm_legit_no_training``, ``_batch_norm_no_update``.
* their gradients: the same names with ``_backward``; ``native_batch_norm_backward`` also with ``train=False``.
* ``batch_norm_stats`` and ``batch_norm_elemt``, which are training too where there is none of the first row,
  ``batch_norm_backward_reduce`` and ``batch_norm_backward_elemt``.

It may declare what other implementations do (`pybnorm.check.run.implementations`), and ``device``, which is CUDA where
PyTorch finds it. Parameters are float64 beside float64, else float32, if it does not say otherwise.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

PREFIX = "aten:"
_FORWARD = (
    *("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
    *("_batch_norm_impl_index", "batch_norm", "_native_batch_norm_legit_functional"),
)
_UPDATING = ("_batch_norm_with_update",)
_INFERENCE = ("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
_BACKWARD = (
    *("native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
    *("_batch_norm_impl_index_backward", "batch_norm_backward"),
)
_DECLARED = ("dtypes", "parameters", "layouts", "modes", "outputs", "unbiased", "saved", "minimum", "supports")
_EVERY = [True, True, True]


class Kernels:
    """An implementation that calls the functions of a module, which reports name `spec`."""

    arrays = "torch"

    def __init__(self, module: Any, spec: str) -> None:
        self._module = module
        torch = importlib.import_module("torch")
        own = {n: v for n, v in getattr(module, "__dict__", {}).items() if inspect.isfunction(v) or not callable(v)}
        self.name, self.version = spec, str(own.get("__version__", torch.__version__))
        self.device = own.get("device", "cuda" if torch.cuda.is_available() else "cpu")
        self.parameters: Any = "derived"
        for name in _DECLARED:
            if name in own:
                setattr(self, name, own[name])

    def _function(self, *names: str) -> tuple[str, Callable[..., Any]]:
        """The first of these that the module has, and its name."""
        for name in names:
            function = getattr(self._module, name, None)
            if callable(function):
                return name, function
        raise NotImplementedError(f"{self.name} has no {' and no '.join(names)}")

    def _forward(self, x: Any, vectors: list[Any], training: bool, factor: float, epsilon: float) -> Any:
        """The results of the first function of these, as a tuple; `vectors` hold the new running statistics."""
        name, function = self._function(*_FORWARD, *(_UPDATING if training else _INFERENCE))
        flag = [] if name in _UPDATING + _INFERENCE else [training]
        more = [False] if name == "_batch_norm_impl_index" or (name == "batch_norm" and _takes(function, 9)) else []
        returns = name == "_native_batch_norm_legit_functional"
        if vectors[2] is None and (returns or name in _UPDATING):
            raise NotImplementedError(f"{self.name}'s {name} needs running statistics")
        found = function(x, *vectors, *flag, factor, epsilon, *more)
        if returns:
            vectors[2:] = found[3:]
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    def forward_training(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        epsilon: float,
        exponential_average_factor: float = 0.0,
        running_mean: Any = None,
        running_variance: Any = None,
    ) -> dict[str, Any]:
        """Training; the running statistics are updated in place."""
        vectors = _flat(scale, bias, running_mean, running_variance)
        if not any(callable(getattr(self._module, name, None)) for name in _FORWARD + _UPDATING):
            if running_mean is not None:
                raise NotImplementedError(f"{self.name} has no training that updates running statistics")
            mean, inverse = self._function("batch_norm_stats")[1](x, epsilon)
            y = self._function("batch_norm_elemt")[1](x, *vectors[:2], mean, inverse, epsilon)
            return {"y": y, "saved_mean": mean, "saved_inv_variance": inverse}
        y, *saved = self._forward(x, vectors, True, exponential_average_factor, epsilon)
        found = {"y": y, "running_mean": vectors[2], "running_variance": vectors[3]}
        return found | dict(zip(("saved_mean", "saved_inv_variance"), saved, strict=False))

    def forward_inference(
        self, x: Any, scale: Any, bias: Any, running_mean: Any, running_variance: Any, epsilon: float
    ) -> Any:
        """Inference by running statistics."""
        vectors = _flat(scale, bias, running_mean, running_variance)
        return self._forward(x, vectors, False, 0.0, epsilon)[0]

    def backward(
        self, x: Any, dy: Any, scale: Any, epsilon: float, saved_mean: Any, saved_inv_variance: Any
    ) -> tuple[Any, ...]:
        """Gradients, by what training has saved."""
        gain, mean, inverse = _flat(scale, saved_mean, saved_inv_variance)
        name, function = self._function(*_BACKWARD)
        saved = gain, None, None, mean, inverse
        has_reserve = name == "batch_norm_backward" and hasattr(self._module, "_batch_norm_with_update")
        if name == "native_batch_norm_backward" or (name == "batch_norm_backward" and not has_reserve):
            return tuple(function(dy, x, *saved, True, epsilon, _EVERY))
        if name == "miopen_batch_norm_backward":
            return tuple(function(x, dy, *saved, epsilon))
        *_, reserve = rest = self._forward(x, [gain, *(gain * 0 for _ in range(3))], True, 0.0, epsilon)
        if has_reserve:
            return tuple(function(dy, x, *saved, True, epsilon, _EVERY, reserve))
        if name == "cudnn_batch_norm_backward":
            return tuple(function(x, dy, *saved, epsilon, reserve))
        return tuple(function(rest[4], x, dy, *saved, True, epsilon, _EVERY, rest[3]))

    def backward_frozen(self, x: Any, dy: Any, scale: Any, mean: Any, variance: Any, epsilon: float) -> dict[str, Any]:
        """Gradients through given statistics."""
        gain, mean, variance = _flat(scale, mean, variance)
        _, function = self._function("native_batch_norm_backward")
        found = function(dy, x, gain, mean, variance, None, None, False, epsilon, _EVERY)
        return dict(zip(("dx", "dscale", "dbias"), found, strict=True))

    def elemt(self, x: Any, scale: Any, bias: Any, mean: Any, inv_variance: Any) -> Any:
        """y by given statistics."""
        _, function = self._function("batch_norm_elemt")
        return function(x, *_flat(scale, bias, mean, inv_variance), 0.0)

    def backward_reduce(self, x: Any, dy: Any, mean: Any, inv_variance: Any) -> dict[str, Any]:
        """The sums of the gradient."""
        mean, inverse = _flat(mean, inv_variance)
        _, function = self._function("batch_norm_backward_reduce")
        found = function(dy, x, mean, inverse, mean * 0 + 1, True, True, True)
        return dict(zip(("sum_dy", "sum_dy_xmu", "dscale", "dbias"), found, strict=True))

    def backward_elemt(
        self, x: Any, dy: Any, scale: Any, mean: Any, inv_variance: Any, sum_dy: Any, sum_dy_xmu: Any, count: int
    ) -> Any:
        """dx by sums."""
        torch = importlib.import_module("torch")
        mean, inverse, gain, total, weighted = _flat(mean, inv_variance, scale, sum_dy, sum_dy_xmu)
        _, function = self._function("batch_norm_backward_elemt")
        counts = torch.tensor([count], dtype=torch.int32, device=x.device)
        return function(dy, x, mean, inverse, gain, total, weighted, counts)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Tell whether a function takes so many arguments by position, as far as its signature says."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _flat(*vectors: Any) -> list[Any]:
    """Parameters with one axis, in the same memory."""
    return [None if vector is None else vector.flatten() for vector in vectors]
