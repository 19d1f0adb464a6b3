"""Batch norm with what follows it, ReLU or an addition and ReLU, as one module.

A module whose ``forward`` calls a batch norm of this package, and gives the result to nothing but ReLU, or to nothing
but an addition whose sum only ReLU gets, is given another ``forward``: ``torch.fx`` writes the old one down, and the
calls become one of the batch norm with ``activation="relu"`` and the residual. Modules, parameters and state stay where
they are; `unfuse` takes the new ``forward`` away.

What cannot be seen with certainty is left as it is: a ``forward`` that ``torch.fx`` cannot trace, or that asks for the
type of what it is given, draws random numbers, changes the module, or is another one in training than in evaluation; a
batch norm or ReLU with hooks; calls between which something else could change what they read. Calls with anything but
tensors in the places of tensors go to the old ``forward``.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.fx

from pybnorm.errors import ArgumentError, ArgumentTypeError
from pybnorm.torch.modules import _BatchNorm

__all__ = ["fuse", "unfuse"]

_Module = TypeVar("_Module", bound=torch.nn.Module)
_RELUS = {torch.relu, torch.relu_, torch.nn.functional.relu, torch.nn.functional.relu_}
_SUMS = {operator.add, operator.iadd, torch.add}
_FRESH = tuple(
    getattr(torch.nn, name) for name in ("Linear", *(f"Conv{t}{n}d" for t in ("", "Transpose") for n in (1, 2, 3)))
)
"""Modules whose result is new memory."""
_HOOKS = "_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks_with_kwargs"
_MARK = "_pybnorm_fused"


class _NotSeenError(Exception):
    """A ``forward`` does what its trace would not show."""


class _Proxy(torch.fx.Proxy):
    """A tensor's stand-in while a ``forward`` is written down; it must not be asked whether it is a tensor."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance asks for
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith(("torch.fx", "torch.nn.parameter")):
            raise _NotSeenError
        return _Proxy


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: torch.fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return call


for _name in (
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    # torch.fx writes `a += b` down as `a = a + b`, of which those who have `a` by another name would see nothing.
    setattr(_Proxy, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))


class _Tracer(torch.fx.Tracer):
    """Writes one ``forward`` down; what it calls are single steps."""

    proxy_buffer_attributes = True  # what changes a buffer is a step too

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _Proxy(node, self)


def fuse(model: _Module, pairs: Sequence[tuple[str, str]] | None = None) -> _Module:
    """Make batch norms of this package and what follows them one module each, in place; `pairs` as in ``convert``."""
    if pairs is not None:
        for norm, relu in _named(model, pairs):
            _install(norm, _with_relu)
            _install(relu, _passed)
        return model
    for module in list(model.modules()):
        inside = any(isinstance(m, _BatchNorm) for m in module.modules())
        if inside and not isinstance(module, _BatchNorm) and "forward" not in module.__dict__:
            found = _rewritten(module)
            if found is not None:
                _install(module, found)
    return model


def unfuse(model: _Module) -> _Module:
    """Undo `fuse`, in place; batch norms stay those of this package."""
    for module in model.modules():
        if hasattr(module.__dict__.get("forward"), _MARK):
            del module.__dict__["forward"]
    return model


def _install(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    setattr(function, _MARK, True)
    module.__dict__["forward"] = types.MethodType(function, module)


# ---------------------------------------------------------------- pairs given by the caller


def _named(model: torch.nn.Module, pairs: Any) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    names, found = dict(model.named_modules()), []
    if type(pairs) not in (list, tuple):
        raise ArgumentTypeError("fuse", pairs, "True, False or a list of pairs of module names")
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise ArgumentTypeError("fuse", pair, "a pair of names: of a batch norm and of the ReLU behind it")
        norm, relu = (names.get(name) if type(name) is str else None for name in pair)
        if not isinstance(norm, _BatchNorm):
            raise ArgumentError("fuse", pair[0], "the name of a batch norm that convert has converted")
        if type(relu) is not torch.nn.ReLU:
            raise ArgumentError("fuse", pair[1], "the name of a torch.nn.ReLU")
        found.append((norm, relu))
    return found


def _with_relu(self: Any, input: torch.Tensor, **given: Any) -> torch.Tensor:
    y: torch.Tensor = type(self).forward(self, input, **{"activation": "relu"} | given)
    return y


def _passed(self: Any, input: torch.Tensor) -> torch.Tensor:
    return input


# ---------------------------------------------------------------- pairs that are found


def _rewritten(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Write another ``forward`` with calls joined; None where there is nothing to join, or it cannot be seen."""
    try:
        graph = _traced(module)
    except Exception:  # whatever a forward does with things that are no tensors
        return None
    names = dict(module.named_modules())
    joined = [_joined(graph, names, node) for node in list(graph.nodes)]
    if not any(joined):
        return None
    graph.lint()
    traced, plain = type(torch.fx.GraphModule(module, graph)).forward, type(module).forward
    count = sum(node.op == "placeholder" for node in graph.nodes)

    @functools.wraps(plain)
    def forward(self: Any, *inputs: Any, **given: Any) -> Any:
        if len(inputs) == count and not given and all(isinstance(x, torch.Tensor) for x in inputs):
            return traced(self, *inputs)
        return plain(self, *inputs, **given)

    return forward


def _traced(module: torch.nn.Module) -> torch.fx.Graph:
    """The steps of a module's ``forward``, which are the same in training and in evaluation."""
    parts = list(module.modules())
    modes, kept, drawn, graphs = [part.training for part in parts], _contents(parts), _drawn(), []
    try:
        for training in (True, False):
            for part in parts:
                part.training = training
            graphs.append(_Tracer().trace(module))
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training
        same = True
        for holder, items in kept:
            if not _same(holder, items):
                same = False
                holder.clear()
                holder.extend(items) if isinstance(holder, list) else holder.update(items)
    if not same or _drawn() != drawn or str(graphs[0]) != str(graphs[1]):
        raise _NotSeenError
    return graphs[0]


def _contents(parts: list[torch.nn.Module]) -> list[tuple[Any, Any]]:
    """The dictionaries, lists and sets of modules, and copies of them."""
    owned = [part.__dict__ for part in parts]
    inner = [value for own in owned for value in own.values() if isinstance(value, dict | list | set)]
    return [(holder, holder.copy()) for holder in (*owned, *inner)]


def _same(holder: Any, items: Any) -> bool:
    if isinstance(holder, dict):
        return holder.keys() == items.keys() and all(value is items[name] for name, value in holder.items())
    return len(holder) == len(items) and all(a is b for a, b in zip(holder, items, strict=True))


def _drawn() -> tuple[Any, ...]:
    """Say where the generators of random numbers are."""
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def _joined(graph: torch.fx.Graph, names: dict[str, torch.nn.Module], relu: torch.fx.Node) -> bool:
    """Say whether a step was ReLU of a batch norm, or of a batch norm and something, and is joined with it."""
    before = _input_of_relu(names, relu)
    if before is None or len(before.users) != 1:
        return False
    if _is_norm(names, before):
        before.kwargs = {"activation": "relu"}
        relu.replace_all_uses_with(before)
        graph.erase_node(relu)
        return True
    in_place = before.target in (operator.iadd, "add_")
    if not in_place and before.target not in (*_SUMS, "add"):
        return False
    if len(before.args) != 2 or before.kwargs or before.op not in ("call_function", "call_method"):
        return False
    for norm, other in (before.args, before.args[::-1]) if not in_place else (before.args,):
        if not isinstance(norm, torch.fx.Node) or norm is other or not _is_norm(names, norm):
            continue
        if len(norm.users) == 1 and _may_wait(names, norm, before):
            with graph.inserting_before(before):
                given = {"activation": "relu", "residual": other, "in_place": in_place}
                made = graph.call_module(str(norm.target), norm.args, given)
            relu.replace_all_uses_with(made)
            for node in (relu, before, norm):
                graph.erase_node(node)
            return True
    return False


def _input_of_relu(names: dict[str, torch.nn.Module], node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument of ReLU, if a step is ReLU."""
    is_relu = (
        (node.op == "call_function" and node.target in _RELUS)
        or (node.op == "call_method" and node.target in ("relu", "relu_"))
        or (node.op == "call_module" and type(names[str(node.target)]) is torch.nn.ReLU)
    )
    if not is_relu or len(node.args) != 1 or set(node.kwargs) - {"inplace"}:
        return None
    if node.op == "call_module":
        module = names[str(node.target)]
        if module._forward_pre_hooks or "forward" in module.__dict__ or _hooked(module):
            return None
    found = node.args[0]
    return found if isinstance(found, torch.fx.Node) else None


def _is_norm(names: dict[str, torch.nn.Module], node: torch.fx.Node) -> bool:
    """Say whether a step is a batch norm whose result nobody else sees."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = names[str(node.target)]
    return isinstance(module, _BatchNorm) and "forward" not in module.__dict__ and not _hooked(module)


def _hooked(module: torch.nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _may_wait(names: dict[str, torch.nn.Module], norm: torch.fx.Node, until: torch.fx.Node) -> bool:
    """Say whether a batch norm may be computed later: nothing in between can write what it reads."""
    if norm.next is until:
        return True
    given = norm.args[0]
    assert isinstance(given, torch.fx.Node)
    made = names.get(str(given.target)) if given.op == "call_module" else None
    return isinstance(made, _FRESH) and len(given.users) == 1 and not _hooked(made)
