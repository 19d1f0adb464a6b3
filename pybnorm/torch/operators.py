"""Custom operators of PyTorch over the calls: what a compiler, an exporter and function transforms can see through.

``torch.ops.pybnorm.batch_norm_training``, ``batch_norm_inference`` and ``batch_norm_backward``. Without them
(PyTorch before 2.4) these names are None here. Plain calls do not go through them: the dispatcher calling Python costs
more than the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pybnorm.errors import ArgumentError
from pybnorm.torch import calls
from pybnorm.torch.calls import Gradients, Optional, dense
from pybnorm.torch.derivatives import Differentiate, Inference, Way, WholeTraining, forward_mode

__all__ = ["inference", "training"]

_SCHEMAS = (
    "batch_norm_training(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float eps, bool fallback, bool deterministic=False) -> (Tensor, Tensor, Tensor)",
    "batch_norm_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "float eps, bool fallback, bool deterministic=False) -> Tensor",
    "batch_norm_backward(Tensor x, Tensor dy, Tensor? weight, Tensor mean, Tensor spread, float eps, bool training, "
    "bool[] wanted, bool fallback, bool deterministic=False) -> (Tensor, Tensor, Tensor)",
)


# ---------------------------------------------------------------- on memory


def _train(x: torch.Tensor, *arguments: Any) -> Any:
    return calls.train(dense(x), *arguments)


def _infer(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return calls.infer(dense(x), *arguments)


def _differentiate(x: torch.Tensor, *arguments: Any) -> Gradients:
    found = calls.differentiate(dense(x), *arguments)
    return tuple([x.new_empty(0) if gradient is None else gradient for gradient in found])  # an operator has no None


# ---------------------------------------------------------------- on shapes


def _statistics_of(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _train_fake(x: torch.Tensor, *arguments: Any) -> Any:
    return torch.empty_like(dense(x)), _statistics_of(x), _statistics_of(x)


def _infer_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty_like(dense(x))


def _differentiate_fake(
    x: torch.Tensor, dy: torch.Tensor, weight: Optional, mean: torch.Tensor, spread: torch.Tensor, eps: float,
    training: bool, wanted: Sequence[bool], fallback: bool, deterministic: bool = False,
) -> Gradients:  # fmt: skip
    like = _statistics_of(x) if weight is None else weight
    made = [torch.empty_like(dense(x)), like.new_empty(x.shape[1]), like.new_empty(x.shape[1])]
    return tuple([one if want else x.new_empty(0) for one, want in zip(made, wanted, strict=True)])


# ---------------------------------------------------------------- derivatives


class _Below(Way):
    """Operators below the derivative that makes them; the next level of `torch.func` looks at all of them again."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys & torch._C._after_autograd_keyset
        self.outer = torch.is_grad_enabled() and torch._C._are_functorch_transforms_active()

    def _call(self, operator: Any, arguments: Any) -> Any:
        if not self.outer:
            return operator.redispatch(self.keys, *arguments)
        with torch.enable_grad():  # which a function's forward has switched off, for the outer levels too
            return operator.redispatch(self.keys, *arguments)

    def train(self, *arguments: Any) -> Any:
        return self._call(training, arguments)

    def infer(self, *arguments: Any) -> Any:
        return self._call(inference, arguments)

    def differentiate(self, *arguments: Any) -> Any:
        return self._call(backward, arguments)

    def back(self, *arguments: Any) -> Any:
        return backward(*arguments)


def _tracked(*tensors: Any) -> bool:
    """Whether a derivative is wanted; forward mode has none, which PyTorch says where a function is applied."""
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return True
    # Looked for only then: it leaves a step in a compiler's graph, of which PyTorch's writes a part down twice and
    # compares the lengths.
    return forward_mode() and any(torch._VF._unpack_dual(tensor, level=0)[1] is not None for tensor in given)


def _apply(function: Any, *arguments: Any) -> Any:
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with torch._functorch.utils.enable_single_level_autograd_function():  # of the other levels the operators take care
        return function.apply(*arguments)


# Each kernel is called without the last argument where it has the schema's default.


def _train_tracked(keys: Any, *arguments: Any) -> Any:
    for changed in arguments[3:5]:
        if changed is not None:
            torch.autograd.graph.increment_version(changed)
    way = _Below(keys)
    if not _tracked(*arguments[:3]):
        return way.train(*arguments)
    return _apply(WholeTraining, *arguments[:5], (way, *arguments[5:8], *(arguments[8:] or (False,))))


def _infer_tracked(keys: Any, *arguments: Any) -> Any:
    way = _Below(keys)
    if not _tracked(*arguments[:3]):
        return way.infer(*arguments)
    return _apply(Inference, *arguments[:5], (way, *arguments[5:7], *(arguments[7:] or (False,))))


def _differentiate_tracked(keys: Any, *arguments: Any) -> Any:
    way = _Below(keys)
    if not _tracked(*arguments[:3]):
        return way.differentiate(*arguments)
    return _apply(Differentiate, *arguments[:5], (way, *arguments[5:]))


# ---------------------------------------------------------------- torch.func.vmap


def _joined(size: int, tensor: Optional, axis: int | None, channels: int) -> Optional:
    """The mapped axis as part of the channels, which all have statistics of their own."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
    return tensor.movedim(0, channels).flatten(channels, channels + 1)


def _train_mapped(info: Any, axes: Any, x: torch.Tensor, *arguments: Any) -> Any:
    n, (weight, bias, mean, variance, *rest) = info.batch_size, arguments
    for running, axis in ((mean, axes[3]), (variance, axes[4])):
        if running is not None and axis is None:
            raise ArgumentError(
                "running_mean", "one for all that torch.vmap maps over, of which each would write it",
                "statistics mapped over too, or None",
            )  # fmt: skip
    joined = [_joined(n, t, axis, 0) for t, axis in zip((weight, bias, mean, variance), axes[1:5], strict=True)]
    y, *saved = training(_joined(n, x, axes[0], 1), *joined, *rest)
    for running, axis, used in zip((mean, variance), axes[3:5], joined[2:], strict=True):
        if running is not None:
            running.movedim(axis, 0).copy_(used.view(n, -1))  # type: ignore[union-attr]
    return (y.unflatten(1, (n, -1)), *(one.view(n, -1) for one in saved)), (1, 0, 0)


def _infer_mapped(info: Any, axes: Any, x: torch.Tensor, *arguments: Any) -> Any:
    n, vectors, rest = info.batch_size, arguments[:4], arguments[4:]
    joined = [_joined(n, t, axis, 0) for t, axis in zip(vectors, axes[1:5], strict=True)]
    return inference(_joined(n, x, axes[0], 1), *joined, *rest).unflatten(1, (n, -1)), 1


def _differentiate_mapped(info: Any, axes: Any, x: torch.Tensor, dy: torch.Tensor, *arguments: Any) -> Any:
    n, vectors, rest, wanted = info.batch_size, arguments[:3], arguments[3:], arguments[5]
    joined = [_joined(n, t, axis, 0) for t, axis in zip(vectors, axes[2:5], strict=True)]
    data = _joined(n, x, axes[0], 1), _joined(n, dy, axes[1], 1)
    dx, *sums = backward(*data, *joined, *rest)
    dx = dx.unflatten(1, (n, -1)) if wanted[0] else dx.expand(n, 0)
    sums = [one.view(n, -1) if want else one.expand(n, 0) for one, want in zip(sums, wanted[1:], strict=True)]
    return (dx, *sums), (1 if wanted[0] else 0, 0, 0)


# ---------------------------------------------------------------- registration


def _register(*operators: tuple[Any, ...], tags: tuple[Any, ...] = (), keys: tuple[str, ...] = ("CPU", "CUDA")) -> Any:
    """A library of operators, which live as long as it does.

    Each is its schema, its kernel, that on shapes, that with a derivative, and that of `torch.vmap`.
    """
    library = torch.library.Library("pybnorm", "FRAGMENT")
    for schema, kernel, fake, tracked, mapped in operators:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        name = schema.partition("(")[0]
        for key in keys:
            library.impl(name, kernel, key)
        library.impl(name, tracked, "Autograd", with_keyset=True)
        torch.library.register_fake(f"pybnorm::{name}", fake, lib=library)
        if hasattr(torch.library, "register_vmap"):  # PyTorch 2.5
            torch.library.register_vmap(f"pybnorm::{name}", mapped, lib=library)
    return library


training: Any = None
inference: Any = None
backward: Any = None
if hasattr(torch.library, "register_fake"):  # PyTorch 2.4
    _library = _register(
        *zip(
            _SCHEMAS,
            (_train, _infer, _differentiate),
            (_train_fake, _infer_fake, _differentiate_fake),
            (_train_tracked, _infer_tracked, _differentiate_tracked),
            (_train_mapped, _infer_mapped, _differentiate_mapped),
            strict=True,
        )
    )
    training = torch.ops.pybnorm.batch_norm_training.default
    inference = torch.ops.pybnorm.batch_norm_inference.default
    backward = torch.ops.pybnorm.batch_norm_backward.default
