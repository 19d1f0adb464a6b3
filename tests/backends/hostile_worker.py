"""Objects that once ended the process; run alone, so that a crash is a failure of one test.

Prints one JSON object: what was tried, and the exception's type with its text, or the type of what came back.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import warnings
from pathlib import Path

import numpy as np

import pybnorm
from pybnorm import _core, functional
from pybnorm._arrays import as_buffer, as_memory

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from test_arrays import Capsule

told: dict[str, str] = {}


def attempt(name, call):
    try:
        told[name] = f"returned {type(call()).__name__}"
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"


class NoHandle(pybnorm.Handle):
    def __init__(self):
        pass


class NoDescriptor(pybnorm.TensorDescriptor):
    def __init__(self):
        pass


class NoPlan(_core.ForwardTrainingPlan):
    def __init__(self):
        pass


x = np.ones((2, 3, 4, 4), np.float32)
y, v = np.empty_like(x), np.ones(3, np.float32)
handle = pybnorm.Handle("onednn")

# ---- what was never made: every method and property, with arguments that are right where there is one


def members(kind, made):
    given = {
        "set_stream": (0,), "follow_stream": (x,), "buffer": (x, "x"), "memory": (None,), "descriptor": (x,),
        "forward_training": (x, v, v, y), "forward_inference": (x, v, v, v, v, y), "backward": (x, x, v, y, v, v),
        "axpby": (1.0, x, 0.0, y), "fill": (1.0, y), "relu": (x, y), "relu_backward": (x, x, y),
        "workspace_size": (0, handle.descriptor(x)), "plan_forward_training": (x,), "plan_forward_inference": (x,),
        "plan_backward": (x,), "__exit__": (None, None, None), "__call__": (x, v, v, y, v, v),
    }  # fmt: skip
    written = ("__firstlineno__", "__static_attributes__")  # of every class of Python source, from 3.13 on
    own = [n for n in dir(kind) if n not in (*dir(object), *written)] + ["__repr__", "__hash__"]
    for name in own:
        if name in ("__dict__", "__weakref__", "__module__", "__init__", "__pyx_vtable__", "__setstate__"):
            continue
        if name == "from_pointer":  # static
            continue

        def use(name=name):
            found = getattr(made(), name)
            return found(*given.get(name, ())) if callable(found) else found

        attempt(f"{kind.__name__}.{name}", use)


for kind in (pybnorm.Handle, pybnorm.TensorDescriptor, _core.ForwardTrainingPlan, _core.ForwardInferencePlan,
             _core.BackwardPlan, _core.Plan):  # fmt: skip
    members(kind, lambda kind=kind: kind.__new__(kind))
for kind in (NoHandle, NoDescriptor, NoPlan):
    members(kind, kind)
never = pybnorm.TensorDescriptor.__new__(pybnorm.TensorDescriptor)
attempt("derive of a descriptor never made", lambda: pybnorm.derive_bn_tensor_descriptor(never, 1))
attempt("plan of a descriptor never made", lambda: handle.plan_forward_training(never))
attempt("call on a handle never made", lambda: pybnorm.fill(NoHandle(), 1.0, handle.descriptor(y), y.ctypes.data))
attempt("list of a handle never made", lambda: _core.CallList(NoHandle()))
attempt("look on a handle never made", lambda: _core.look(NoHandle(), ("x",), (x,)))
attempt("defects on a handle never made", lambda: _core.defects_of(NoHandle(), None))

# ---- None where a tensor or a handle is needed

for name in ("plan_forward_training", "plan_forward_inference", "plan_backward"):
    attempt(f"{name}(None)", lambda name=name: getattr(handle, name)(None))
calls = _core.CallList(handle)
attempt("CallList.append(None)", lambda: calls.append(None, 3, {}, (0, 0), a=1.0, b=0.0))
attempt("CallList.append without arrays", lambda: calls.append(handle, 3, None, (0, 0), a=1.0, b=0.0))
for operation in range(12):
    attempt(
        f"CallList.append of {operation} without tensors",
        lambda operation=operation: calls.append(
            handle, operation, {}, (0, 0), mode=1, alpha=1.0, beta=0.0, alpha_param=1.0,
            beta_param=0.0, epsilon=1e-5, exponential_average_factor=0.1, a=1.0, b=0.0, value=1.0,
        ),
    )  # fmt: skip
attempt("CallList.run(None)", lambda: calls.run(None, (0,)))
attempt("CallList.run of None", lambda: calls.run(handle, None))
attempt("CallList.apart(None)", lambda: calls.apart(None))

# ---- functional: an address is not an array, the first time and when such a call is kept

bystander = np.zeros(64, np.float32)
address = bystander.ctypes.data


def train(x, scale, bias, mean, variance, **options):
    return functional.batch_norm_training(x, scale, bias, running_mean=mean, running_variance=variance, **options)


def infer(x, scale, bias, mean, variance, **options):
    running = {"running_mean": mean, "running_variance": variance}
    return functional.batch_norm_inference(x, **running, scale=scale, bias=bias, **options)


functions = {
    "training": (train, [x, v, v, v.copy(), v.copy()], [y, v.copy(), v.copy()]),
    "inference": (infer, [x, v, v, v, v], [y]),
    "backward": (functional.batch_norm_backward, [x, x, v, v, v], [y, v.copy(), v.copy()]),
}
for name, (function, arguments, results) in functions.items():
    for mine in (None, handle):
        out = tuple(results) if len(results) > 1 else results[0]
        function(*arguments, handle=mine, out=out)  # kept
        for i in range(len(arguments)):
            changed = [*arguments[:i], address, *arguments[i + 1 :]]
            attempt(f"{name} argument {i}, {mine}", lambda f=function, a=changed, o=out, h=mine: f(*a, handle=h, out=o))
        for i in range(len(results)):
            changed = tuple(address if j == i else r for j, r in enumerate(results))
            changed = changed if len(changed) > 1 else changed[0]
            attempt(
                f"{name} out {i}, {mine}", lambda f=function, a=arguments, o=changed, h=mine: f(*a, handle=h, out=o)
            )
told["bystander"] = "untouched" if not bystander.any() else "written"

# ---- tensors of DLPack that lie


class Lies(Capsule):
    def __init__(self, **fields):
        change = {k: fields.pop(k) for k in ("ndim", "shape_address", "strides_address") if k in fields}
        super().__init__(**fields)
        tensor = self.managed.tensor
        if "ndim" in change:
            tensor.ndim = change["ndim"]
        if "shape_address" in change:
            tensor.shape = change["shape_address"]


for versioned in (True, False):
    lies = {
        "shape NULL": {"shape_address": None},
        "ndim 2**30": {"ndim": 2**30},
        "ndim -1": {"ndim": -1},
        "ndim 65": {"ndim": 65},
        "data NULL with an offset": {"data": 0, "byte_offset": 64},
        "data NULL": {"data": 0},
        "negative size": {"dims": (2, -3)},
        "bits 0": {"bits": 0},
        "lanes 0": {"lanes": 0},
        "an address past 2**64": {"byte_offset": 2**64 - 4},
    }
    for name, fields in lies.items():
        made = Lies(versioned=versioned, **fields)
        attempt(f"{name}, {versioned}: as_buffer", lambda made=made: as_buffer(made, "x"))
        attempt(f"{name}, {versioned}: as_memory", lambda made=made: as_memory(made, "workspace"))
        attempt(f"{name}, {versioned}: fill", lambda made=made: handle.fill(1.0, made))
        attempt(f"{name}, {versioned}: workspace", lambda made=made: handle.axpby(1.0, x, 0.0, y, workspace=made))

# ---- references to objects are no memory

plan = handle.plan_forward_training(x, running=False, saved=False)
for name, array in {
    "object": np.array([object() for _ in range(4096)], dtype=object),
    "structure": np.zeros(512, np.dtype([("a", "f4"), ("b", "O")])),
}.items():
    attempt(f"{name} as workspace", lambda array=array: handle.axpby(1.0, x, 0.5, y, workspace=array))
    attempt(f"{name} as memory", lambda array=array: handle.memory(array))
    attempt(f"{name} behind a memoryview", lambda array=array: as_memory(memoryview(array), "workspace"))
    attempt(f"{name} as reserve", lambda array=array: plan(x, v, v, y, reserve=array))
    del array
    gc.collect()
kinds = ctypes.py_object * 64
attempt("ctypes objects as workspace", lambda: handle.axpby(1.0, x, 0.5, y, workspace=kinds()))

handle.close()
warnings.simplefilter("error")
json.dump(told, sys.stdout)
