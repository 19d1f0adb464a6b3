"""Any Python object as the one that computes: ``pybnorm check --implementation MODULE:OBJECT``.

``aten:MODULE`` is a module of kernels with the signatures of PyTorch's operators (`pybnorm.check.run.aten`).

The object has the methods ``forward_training``, ``forward_inference`` and ``backward``, or some of them. MODULE is the
name of a module, found from the current folder too, or a file, ``FILE.py``; OBJECT is an instance of a class, or the
class itself, which is then called without arguments::

    class OneLiner:                # my_kernel.py: pybnorm check --implementation my_kernel:OneLiner --suite standard
        name = "my kernel"         # for reports
        version = "1.0"
        arrays = "numpy"           # numpy | torch | cupy | jax
        device = "cpu"             # cpu | cuda

        def forward_inference(self, x, scale, bias, running_mean, running_variance, epsilon):
            y = scale * (x - running_mean) / np.sqrt(running_variance + epsilon) + bias
            return y.astype(x.dtype)  # of 16-bit data, too, whose parameters are float32

The four attributes may be left out: the name is then MODULE:OBJECT, arrays are NumPy's, and they are on the CPU (those
of CuPy on CUDA).

Arguments
---------
All are passed by keyword, and a method's signature says what it can do. A case is UNSUPPORTED if it has an argument
that the method does not take, lacks one that the method needs, or if the method raises `NotImplementedError`.

* Arrays: those of `pybnorm.Handle`'s method of that name, such as ``x``, ``scale``, ``saved_inv_variance``. Data have
  the dims, strides and dtype of the case; parameters and statistics have x's rank, with 1 in place of the axes that are
  reduced. A case with ``running=0`` or ``saved=0`` does not pass those statistics.
* ``epsilon``, and ``exponential_average_factor`` in training.
* ``y``, or ``dx``, is the memory of ``x``, or ``dy``, in a case with ``inplace=1``.
* Those of a composed operation (``frozen`` and so on) are the arrays, numbers and ``axis`` of the function of
  `pybnorm.operations`, which is also the method's name, such as ``backward_reduce``; a method that does not take
  ``axis`` gets the cases where it is 1.
* ``activation``, its limits, ``z`` and other tensors of `pybnorm.Handle` where the case has them.
* ``alpha``, ``beta``, ``alpha_param``, ``beta_param`` and ``mode`` (``"spatial"``, ``"persistent"`` or ``"peract"``): a
  method that does not take them gets the cases where they are 1, 0, 1, 0 and ``"spatial"``.

Results
-------
A method may take the arrays of results (y, the running and the saved statistics; dx, dscale and dbias) and write them
in place. What it does not write, it returns: a mapping of their names, a tuple in this order, of those that the case
has, or one array. A returned statistic may be without the axes of length 1.

Running statistics hold the values before the call, and y, dx, dscale and dbias the prior if its beta is not 0; other
results hold NaN. Arrays lie in memory that is watched: a write outside of the results is a FAIL. JAX's cannot be
written and have no strides: they are copies, in channels-first order, on JAX's own device.

Declarations
------------
What an object does not claim is UNSUPPORTED, and not wrong. All of these attributes may be left out:

* ``dtypes``, ``layouts`` (``"nchw"``, ``"nhwc"``, ``"strides"``) and ``modes``: words of a case, in a tuple.
* ``parameters``: the dtypes of scale, bias and statistics, or ``"derived"``: float64 beside float64, else float32.
* ``outputs``: the results that it gives. Without saved or without running statistics, training is judged without them.
* ``unbiased = False``: its running variance takes the biased variance, as ONNX's, TensorFlow's and Keras's.
* ``saved = "variance"``: it saves the variance, in place of the inverse standard deviation.
* ``minimum``: a mapping with the least ``m`` (elements of a statistic), ``epsilon``, ``rank``, ``images`` or
  ``channels``.
* ``supports(case)``: of a `pybnorm.check.Problem`, True, False, or the reason why not.

Faults of an object have statuses of their own: RAISED (an exception, with its last line), FAIL (a wrong result, dtype,
shape or name), CRASHED and TIMEOUT (its process died or did not end), RESOURCE (a MemoryError).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Container, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import CPU, CUDA, Buffer, numpy_dtype
from pybnorm.check.judging.bounds import Status
from pybnorm.check.judging.standalone import mismatch, words
from pybnorm.check.language import calls
from pybnorm.check.language.problem import DATA_TYPES, LAYOUTS, MODES, Problem
from pybnorm.check.run import aten
from pybnorm.enums import DataType
from pybnorm.errors import ArgumentError

__all__ = ["ARRAYS", "DEVICES", "CallError", "Implementation", "load"]

ARRAYS = ("numpy", "torch", "cupy", "jax")
"""Values of an object's attribute ``arrays``."""
DEVICES = {"cpu": CPU, "cuda": CUDA}
"""Values of an object's attribute ``device``, with their DLPack device types."""
_NEUTRAL = {"alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0, "mode": "spatial", "axis": 1}
_TENSORS = {call.name: call.tensors for call in calls.CALLS.values()}


class CallError(Exception):
    """A call of an implementation that gave no results to judge; `status` is that of the case."""

    def __init__(self, status: Status, text: str) -> None:
        self.status = status
        super().__init__(status, text)

    def __str__(self) -> str:
        return str(self.args[1])


@functools.cache
def load(spec: str) -> Implementation:
    """The implementation that ``MODULE:OBJECT`` or ``FILE.py:OBJECT`` names, once for this process.

    Raises ArgumentError: there is none, or its attributes are not what they may be. Raises what its module raises.
    """
    if spec.startswith(aten.PREFIX):
        kernels, module = _kernels(spec)
        return Implementation(spec, aten.Kernels(kernels, spec), module)
    name, _, path = spec.rpartition(":")
    if not name or not path:
        raise ArgumentError("--implementation", spec, "MODULE:OBJECT or FILE.py:OBJECT")
    module = _module(name, spec)
    try:
        found = operator.attrgetter(path)(module)
    except AttributeError:
        known = [n for n, value in vars(module).items() if _has_method(value)]
        has = f"; it has {', '.join(known)}" if known else ""
        raise ArgumentError("--implementation", spec, f"an object of {module.__name__}{has}") from None
    return Implementation(spec, found() if isinstance(found, type) else found, module)


def _kernels(spec: str) -> tuple[Any, ModuleType]:
    """The object that ``aten:MODULE`` names, a file, a module or an object below one, and the module."""
    name = spec.removeprefix(aten.PREFIX)
    if not name:
        raise ArgumentError("--implementation", spec, "aten:MODULE or aten:FILE.py")
    first, *parts = [name] if name.endswith(".py") else name.split(".")
    found = module = _module(first, spec)
    for part in parts:
        first = f"{first}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        else:
            found = module = _imported(first, spec)
    return found, module


def _has_method(value: object) -> bool:
    return any(callable(inspect.getattr_static(value, method, None)) for method in _TENSORS)


def _module(name: str, spec: str) -> ModuleType:
    return _file(name, spec) if name.endswith(".py") else _imported(name, spec)


def _imported(name: str, spec: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of something that it imports
        raise ArgumentError("--implementation", spec, f"a module that can be imported ({error})") from None


def _file(name: str, spec: str) -> ModuleType:
    path = Path(name).absolute()
    if not path.is_file():
        raise ArgumentError("--implementation", spec, "a file that is there")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what it imports, as where Python runs a file
    sys.modules.setdefault(path.stem, module)
    found.loader.exec_module(module)
    return module


DERIVED = "derived"
_SAVED = ("inverse standard deviation", "variance")
_OUTPUTS = tuple(dict.fromkeys(t.name for tensors in _TENSORS.values() for t in tensors if t.written))
_LEAST: dict[str, Callable[[Problem], float]] = {
    "m": lambda problem: problem.m,
    "epsilon": lambda problem: problem.epsilon,
    "rank": lambda problem: len(problem.dims),
    "images": lambda problem: problem.dims[0],
    "channels": lambda problem: problem.dims[1],
}
_PAIRS = {"saved": ("saved_mean", "saved_inv_variance"), "running": ("running_mean", "running_variance")}
"""Fields of a problem without which training has no such results."""


def _choice(spec: str, target: Any, name: str, allowed: Collection[str]) -> str:
    """An attribute that is one of a few words; the first where it is left out."""
    value = getattr(target, name, next(iter(allowed)))
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(f"{spec}.{name}", value, " | ".join(allowed))
    return value


class Declarations:
    """The attributes of an object that say what it claims (`pybnorm.check.run.implementations`)."""

    def __init__(self, spec: str, target: Any) -> None:
        self._spec, self._target = spec, target
        self.dtypes = self._words("dtypes", DATA_TYPES)
        self.parameters = self._words("parameters", (*DATA_TYPES, DERIVED))
        self.layouts = self._words("layouts", (*LAYOUTS, "strides"))
        self.modes = self._words("modes", MODES)
        self.outputs = self._words("outputs", _OUTPUTS)
        self.unbiased = getattr(target, "unbiased", True)
        if not isinstance(self.unbiased, bool):
            raise ArgumentError(f"{spec}.unbiased", self.unbiased, "True | False")
        self.saved = _choice(spec, target, "saved", _SAVED)
        self.minimum = getattr(target, "minimum", {})
        pairs = self.minimum.items() if isinstance(self.minimum, Mapping) else [("", None)]
        if not all(name in _LEAST and isinstance(value, (int, float)) for name, value in pairs):
            raise ArgumentError(f"{spec}.minimum", self.minimum, f"a mapping of numbers by {' | '.join(_LEAST)}")

    def _words(self, name: str, allowed: Collection[str]) -> tuple[str, ...] | None:
        """An attribute that is some of a few words; None where it is left out, which claims all."""
        value = getattr(self._target, name, None)
        if value is None:
            return None
        words = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Collection) else (value,)
        if wrong := [word for word in words if word not in allowed]:
            raise ArgumentError(f"{self._spec}.{name}", wrong[0], " | ".join(allowed))
        return words

    def applied(self, problem: Problem) -> Problem | str:
        """The problem that is run and judged for `problem`, or why it is not claimed."""
        token = str(problem).split(",")
        for title, claimed, word in (
            ("data", self.dtypes, problem.dtype.short),
            ("mode", self.modes, token[1]),
            ("layout", self.layouts, token[3].partition("=")[0]),
        ):
            if claimed is not None and word not in claimed:
                return f"does not claim {title} {word}"
        kind = problem.parameter_dtype
        named = {kind.short, DERIVED if kind == problem.default_params else ""}
        if self.parameters is not None and not named & set(self.parameters):
            return f"does not claim parameters of {kind.short} beside {problem.dtype.short}"
        for name, least in self.minimum.items():
            if _LEAST[name](problem) < least:
                return f"claims {name} >= {least:g} only"
        found = self._with_its_outputs(problem)
        supports = getattr(self._target, "supports", None)
        answer = True if supports is None or isinstance(found, str) else supports(found)
        if isinstance(answer, str):
            return answer or found
        return found if answer or answer is None else "does not claim this case"

    def _with_its_outputs(self, problem: Problem) -> Problem | str:
        """The problem without the results that it does not give, by the conventions of those that it gives."""
        trains = problem.word == "train"
        changes: dict[str, Any] = {}
        lacks = [t.name for t in calls.outputs(problem) if self.outputs is not None and t.name not in self.outputs]
        for field, pair in _PAIRS.items() if trains else ():
            if set(lacks) & set(pair):
                changes[field] = False
                lacks = [name for name in lacks if name not in pair]
        if lacks:
            return f"does not give {' and '.join(lacks)}"
        if "running" in changes:
            changes |= {"unbiased": True, "old": "drawn"}
        elif trains and problem.running and not self.unbiased:
            changes["unbiased"] = False
        if self.saved == "variance" and problem.saved and "saved" not in changes:
            if problem.word == "backward":
                return "saves the variance, and backward cases give the inverse standard deviation"
            changes |= {"saves_variance": True} if trains else {}
        return dataclasses.replace(problem, **changes) if changes else problem


class Implementation:
    """An object that a `pybnorm.check.run.session.Session` calls in place of a `pybnorm.Handle`.

    Raises ArgumentError: the object has no method, or an attribute is not what it may be.
    """

    def __init__(self, spec: str, target: Any, module: ModuleType | None = None) -> None:
        self.spec, self.target = spec, target
        self.in_place = False
        if not any(callable(getattr(target, method, None)) for method in _TENSORS):
            raise ArgumentError("--implementation", spec, f"an object with a method {' or '.join(_TENSORS)}")
        self.name = str(getattr(target, "name", spec))
        text = str(getattr(target, "version", ""))
        numbers = re.match(r"\d+(\.\d+)*", text)
        self.version = tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
        self.path = getattr(module, "__file__", None) or spec
        self.arrays = _choice(spec, target, "arrays", ARRAYS)
        self.device = _choice(spec, target, "device", DEVICES if self.arrays != "cupy" else ("cuda",))
        if self.arrays == "numpy" and self.device != "cpu":
            raise ArgumentError(f"{spec}.device", self.device, "cpu with arrays='numpy'")
        self.framework = _FRAMEWORKS[self.arrays](self.device)
        self._declared = Declarations(spec, target)
        self._returned: dict[str, Any] = {}
        """The arrays that the last call returned, held as a caller may hold them."""
        self.neighbours: set[tuple[Any, ...]] = set()
        """Kinds of cases whose `pybnorm.check.run.runner.neighbour` was called."""

    def claimed(self, problem: Problem) -> Problem:
        """The problem that is run and judged for `problem`, by what the object declares.

        Raises CallError: it does not claim the problem, or what its ``supports`` raised.
        """
        try:
            found = self._declared.applied(problem)
        except Exception as error:
            raise _of_exception(error, self.path) from error
        if isinstance(found, str):
            raise CallError(Status.UNSUPPORTED, f"{self.name} {found}")
        return found

    @property
    def device_type(self) -> int:
        """DLPack device type of where it computes."""
        return DEVICES[self.device]

    @property
    def memory_type(self) -> int:
        """DLPack device type of the memory that a case's arrays lie in; JAX copies them to its own device."""
        return CPU if self.arrays == "jax" else self.device_type

    def set_stream(self, stream: int) -> None:
        """Refuse a stream: the object is given none."""
        raise CallError(Status.UNSUPPORTED, f"{self.name} is given no streams")

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method not in _TENSORS:
            raise AttributeError(method)
        return functools.partial(self._call, method)

    def _call(self, method: str, *, workspace: object = None, **arguments: Any) -> None:
        function = getattr(self.target, method, None)
        if not callable(function):
            raise CallError(Status.UNSUPPORTED, f"{self.name} has no {method}")
        arguments = words(arguments)
        given = self._taken(function, method, arguments)
        outputs = [t.name for t in _TENSORS[method] if t.written and t.name in arguments]
        writable = set(given) if self.framework.writes else set()
        if self.in_place and not writable & {"y", "dx"}:
            text = f"{self.name}'s {method} does not take the array of its result, to write it in place"
            raise CallError(Status.UNSUPPORTED, text)
        made = {n: self.framework.of(v) if isinstance(v, Buffer) else v for n, v in given.items()}
        try:
            returned = function(**made)
            self.framework.synchronize()
        except Exception as error:
            raise _of_exception(error, self.path) from error
        results = self._results(method, returned, outputs, writable)
        self._hold(method, results, [v.pointer for v in arguments.values() if isinstance(v, Buffer)])
        for name, value in results.items():
            tensor = next(t for t in _TENSORS[method] if t.name == name)
            self._store(tensor, arguments[name], value)
        self.framework.synchronize()

    def _taken(self, function: Callable[..., Any], method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the method takes; it must need no others, and may leave out only what changes nothing."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # of an extension module, which may take everything
            return dict(arguments)
        takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        given = {name: value for name, value in arguments.items() if takes_all or name in parameters}
        written = {t.name for t in _TENSORS[method] if t.written}
        matters = [n for n in arguments if n not in given and n not in written and _NEUTRAL.get(n) != arguments[n]]
        for name in matters:
            if name != "exponential_average_factor" or "running_mean" in arguments:
                text = f"={arguments[name]!r}" if isinstance(arguments[name], str) else ""
                raise CallError(Status.UNSUPPORTED, f"{self.name}'s {method} does not take {name}{text}")
        for name, parameter in parameters.items():
            variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if name not in given and parameter.default is parameter.empty and not variable:
                raise CallError(Status.UNSUPPORTED, f"{self.name}'s {method} needs {name}, which this case has not")
        return given

    def _results(self, method: str, returned: Any, outputs: list[str], taken: Container[str]) -> dict[str, Any]:
        """The returned arrays by name; those that are missing must have been there to be written."""
        named = {} if returned is None else returned
        if not isinstance(named, Mapping):
            values = named if isinstance(named, (tuple, list)) else (named,)
            if len(values) != len(outputs):
                text = f"{len(values)} arrays without names, not {len(outputs)}: {', '.join(outputs)}"
                raise CallError(Status.FAIL, f"{method} returned {text}")
            named = dict(zip(outputs, values, strict=True))
        known = [t.name for t in _TENSORS[method] if t.written]
        if wrong := [name for name in named if name not in known]:
            raise CallError(Status.FAIL, f"{method} returned {wrong[0]!r}, allowed: {' | '.join(known)}")
        results = {name: value for name, value in named.items() if name in outputs and value is not None}
        if missing := [name for name in outputs if name not in results and name not in taken]:
            what = "None" if returned is None else f"no {' and no '.join(missing)}"
            text = f"{method} returned {what}, and does not take {', '.join(missing)} to write in place"
            raise CallError(Status.FAIL, text)
        return results

    def _hold(self, method: str, results: Mapping[str, Any], given: list[int]) -> None:
        """Keep what a call returned until the next one, which must not return the same memory."""
        held = {self.framework.address(value): name for name, value in self._returned.items()}
        for name, value in results.items():
            address = self.framework.address(value)
            if address in held and address not in given:
                text = f"{method} returned {name} in the memory of {held[address]} of the call before it"
                raise CallError(Status.FAIL, f"{text}, which the caller may still hold")
        self._returned = {n: v for n, v in results.items() if self.framework.address(v) not in (0, *given)}

    def _store(self, tensor: calls.Tensor, buffer: Buffer, value: Any) -> None:
        """Write a returned array to where the results are read."""
        if wrong := mismatch(tensor, buffer.dims, buffer.dtype.name.lower(), value):
            raise CallError(Status.FAIL, f"{tensor.name} {wrong}")
        try:
            self.framework.write(buffer, value.reshape(buffer.dims))
        except Exception as error:
            kind = type(value).__module__.partition(".")[0]
            text = f"{tensor.name} is an array of {kind}, not of {self.arrays}: {type(error).__name__}: {error}"
            raise CallError(Status.FAIL, text) from None


def _of_exception(error: Exception, path: str) -> CallError:
    """Text of an exception of the implementation, and where it was raised."""
    name = type(error).__name__
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, NotImplementedError):
        return CallError(Status.UNSUPPORTED, str(error) or text)
    if isinstance(error, MemoryError) or "OutOfMemory" in name:
        return CallError(Status.RESOURCE, text)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path] or frames[1:]  # the first is this file's
    where = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    return CallError(Status.RAISED, text + where)


_TYPES = {DataType.FLOAT64: "<f8", DataType.FLOAT32: "<f4", DataType.FLOAT16: "<f2", DataType.BFLOAT16: "<i2"}


class _Memory:
    """An array interface on a buffer, which it keeps alive."""

    def __init__(self, buffer: Buffer) -> None:
        strides = tuple(s * buffer.dtype.itemsize for s in buffer.strides)
        interface = {"shape": buffer.dims, "strides": strides, "typestr": _TYPES[buffer.dtype], "version": 3}
        interface["data"] = buffer.pointer, False
        setattr(self, f"__{'' if buffer.device_type == CPU else 'cuda_'}array_interface__", interface)
        self.owner = buffer.owner


class _Numpy:
    writes = True
    """Whether a method can write to the arrays that it is given."""

    def __init__(self, device: str) -> None:
        self.device = device

    def of(self, buffer: Buffer) -> Any:
        """The array that a method is given."""
        return np.asarray(_Memory(buffer)).view(numpy_dtype(buffer.dtype))

    def write(self, buffer: Buffer, value: Any) -> None:
        """Copy a returned array of the right shape and dtype."""
        self.of(buffer)[...] = value

    def address(self, value: Any) -> int:
        """The address of a returned array; 0 where that cannot be said or nobody can write to it."""
        return int(value.ctypes.data) if isinstance(value, np.ndarray) and value.size else 0

    def synchronize(self) -> None:
        """Wait for the device; an error of asynchronous work is raised here."""


class _Torch(_Numpy):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.torch = importlib.import_module("torch")
        if device != "cpu" and not self.torch.cuda.is_available():
            raise RuntimeError(f"PyTorch {self.torch.__version__} finds no {device} device")

    def of(self, buffer: Buffer) -> Any:
        memory = _Memory(buffer)
        if self.device == "cpu":
            tensor = self.torch.from_numpy(np.asarray(memory))
        else:
            tensor = self.torch.as_tensor(memory, device=self.device)
        return tensor.view(self.torch.bfloat16) if buffer.dtype == DataType.BFLOAT16 else tensor

    def write(self, buffer: Buffer, value: Any) -> None:
        self.of(buffer).copy_(value.detach())

    def address(self, value: Any) -> int:
        return int(value.data_ptr()) if isinstance(value, self.torch.Tensor) else 0

    def synchronize(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()


class _Cupy(_Numpy):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.cupy = importlib.import_module("cupy")

    def of(self, buffer: Buffer) -> Any:
        if buffer.dtype == DataType.BFLOAT16:
            raise CallError(Status.UNSUPPORTED, "CuPy has no bfloat16")
        return self.cupy.asarray(_Memory(buffer))

    def address(self, value: Any) -> int:
        return int(value.data.ptr) if isinstance(value, self.cupy.ndarray) else 0

    def synchronize(self) -> None:
        self.cupy.cuda.Device().synchronize()


class _Jax(_Numpy):
    writes = False

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.jax = importlib.import_module("jax")

    def of(self, buffer: Buffer) -> Any:
        if buffer.strides != _arguments.packed_strides(buffer.dims):
            raise CallError(Status.UNSUPPORTED, "JAX's arrays have no strides: nchw only")
        array = self.jax.numpy.array(super().of(buffer))
        if array.dtype != numpy_dtype(buffer.dtype):
            raise CallError(Status.UNSUPPORTED, "float64 in JAX needs jax.config.update('jax_enable_x64', True)")
        return array

    def write(self, buffer: Buffer, value: Any) -> None:
        super().of(buffer)[...] = np.asarray(value)


_FRAMEWORKS = {"numpy": _Numpy, "torch": _Torch, "cupy": _Cupy, "jax": _Jax}
