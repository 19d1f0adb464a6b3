"""What a call may be given, written down once more for the fuzz: nothing of `pybnorm._arguments` is used.

A rule looks at the arguments of a call as they are and returns what is wrong with them, by name; an empty list is a
good call. `Unsure` marks what the rules leave open: memory that interleaves without sharing an element, and strides
that do not overlap but do not nest.
"""

from __future__ import annotations

import itertools
import math
import numbers
from typing import Any

import numpy as np

from pybnorm import Activation, DataType, Handle, Mode, Operation, TensorDescriptor
from pybnorm._arrays import Buffer

INT_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
ITEM = {DataType.FLOAT64: 8, DataType.FLOAT32: 4, DataType.FLOAT16: 2, DataType.BFLOAT16: 2}
NUMPY = {"float64": DataType.FLOAT64, "float32": DataType.FLOAT32, "float16": DataType.FLOAT16,
         "bfloat16": DataType.BFLOAT16}  # fmt: skip


class Unsure(Exception):
    """The rules do not say."""


def numbers_of(value: Any) -> float | None:
    """The float that an argument is, or None."""
    if isinstance(value, (bool, str, bytes)) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def scalar(name: str, value: Any, wide: bool) -> list[str]:
    number = numbers_of(value)
    if number is None or not math.isfinite(number) or (not wide and abs(number) > FLOAT32_MAX):
        return [f"{name} is no finite number of the scalar type"]
    return []


def epsilon(value: Any) -> list[str]:
    number = numbers_of(value)
    return [] if number is not None and 0 <= number <= FLOAT32_MAX else ["epsilon is not finite and >= 0"]


def factor(value: Any) -> list[str]:
    number = numbers_of(value)
    return [] if number is not None and 0 <= number <= 1 else ["the factor is not from 0 to 1"]


def mode(value: Any) -> Mode | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return next((m for m in Mode if value in (m.name, m.name.lower())), None)
    return next((m for m in Mode if isinstance(value, numbers.Integral) and int(value) == m.value), None)


def activation(options: dict[str, Any], wide: bool) -> list[str]:
    kind, low, high = (options.get(n) for n in ("activation", "activation_low", "activation_high"))
    kind = Activation.NONE if "activation" not in options else kind
    if isinstance(kind, str):
        kind = next((a for a in Activation if kind in (a.name, a.name.lower())), None)
    elif isinstance(kind, bool) or not isinstance(kind, numbers.Integral) or int(kind) not in range(4):
        kind = None
    if kind is None:
        return ["activation is none of the four"]
    needs = {Activation.CLIPPED_RELU: (False, True), Activation.CLAMP: (True, True)}.get(kind, (False, False))
    wrong = []
    for name, value, needed in (("activation_low", low, needs[0]), ("activation_high", high, needs[1])):
        if (value is not None) != needed:
            wrong.append(f"{name} is missing, or has no meaning")
        elif needed:
            wrong += scalar(name, value, wide)
    if not wrong and needs[1]:
        width = np.float64 if wide else np.float32
        if not width(0.0 if low is None else float(low)) < width(float(high)):
            wrong.append("the bounds of the activation are empty")
    return wrong


def activation_bias(options: dict[str, Any], backward: bool, null: tuple[Any, ...]) -> list[str]:
    """Backward has a bias with an activation and only then; `options` have passed `activation`."""
    if not backward:
        return []
    value = options.get("bias")
    absent = any(value is n or (n is not None and type(value) is type(n) and value == n) for n in null)
    return ["bias without an activation, or the other way round"] if absent == has_activation(options) else []


def has_activation(options: dict[str, Any]) -> bool:
    return options.get("activation", 0) not in (0, "none", "NONE")


# ---------------------------------------------------------------- memory


class Tensor:
    """What an array or a descriptor says, in one form."""

    def __init__(self, dims, strides, dtype, pointer, writable=True, device=1, ordinal=-1):
        self.dims, self.strides, self.dtype, self.pointer = tuple(dims), tuple(strides), dtype, pointer
        self.writable, self.device, self.ordinal = writable, device, ordinal

    @property
    def size(self) -> int:
        return ITEM[self.dtype]

    @property
    def last(self) -> int:
        """One past the last byte."""
        return self.pointer + (sum((d - 1) * s for d, s in zip(self.dims, self.strides, strict=True)) + 1) * self.size

    def offsets(self) -> set[int]:
        """The byte offset of every element."""
        axes = [[i * s * self.size for i in range(d)] for d, s in zip(self.dims, self.strides, strict=True)]
        return {self.pointer + sum(steps) for steps in itertools.product(*axes)}


def tensor_of(value: Any) -> Tensor | None:
    """An array argument, or None where it is not one that any backend takes."""
    if isinstance(value, Buffer):
        return Tensor(value.dims, value.strides, value.dtype, value.pointer, value.writable, value.device_type,
                      value.device_id)  # fmt: skip
    if isinstance(value, np.ndarray) and value.dtype.isnative and value.dtype.name in NUMPY:
        if any(s % value.itemsize for s in value.strides):
            return None
        steps = [s // value.itemsize for s in value.strides]
        return Tensor(value.shape, steps, NUMPY[value.dtype.name], value.ctypes.data, value.flags.writeable)
    return None


def sizes(name: str, dims: tuple[int, ...]) -> list[str]:
    if not 2 <= len(dims) <= 8:
        return [f"{name} has rank {len(dims)}"]
    return [] if all(1 <= d <= INT_MAX for d in dims) else [f"{name} has a size outside 1 to 2**31 - 1"]


def steps(name: str, dims: tuple[int, ...], strides: tuple[int, ...], free: bool) -> list[str]:
    """Strides of data; `free`: those of axes of length 1 do not matter (arrays), else they do (descriptors)."""
    if len(dims) != len(strides):
        return [f"{name} has another number of strides"]
    if any(not 1 <= s <= INT_MAX for d, s in zip(dims, strides, strict=True) if d != 1):
        return [f"{name} has a stride outside 1 to 2**31 - 1"]
    if any(not 1 <= s <= INT_MAX for d, s in zip(dims, strides, strict=True) if d == 1):
        if not free:
            return [f"{name} has a stride outside 1 to 2**31 - 1"]
        if any(s > INT_MAX for s in strides):
            raise Unsure
    moving = sorted((s, d) for s, d in zip(strides, dims, strict=True) if d > 1)
    nested = all(s > sum((d - 1) * t for t, d in moving[:i]) for i, (s, _) in enumerate(moving))
    if nested:
        return []
    if math.prod(dims) > 1 << 16:
        raise Unsure
    reached = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*dims)]
    if len(set(reached)) != len(reached):
        return [f"elements of {name} share memory"]
    raise Unsure


def data(name: str, value: Any, handle: Handle, output: bool) -> tuple[list[str], Tensor | None]:
    tensor = tensor_of(value)
    if tensor is None:
        return [f"{name} is not an array of the four types"], None
    wrong = memory(name, tensor, handle, output)
    wrong += sizes(name, tensor.dims) or steps(name, tensor.dims, tensor.strides, True)
    return wrong, tensor


def memory(name: str, tensor: Tensor, handle: Handle, output: bool) -> list[str]:
    kind = handle.library.device_type
    wrong = []
    if tensor.device not in {1: (1, 3, 11), 2: (2, 13), 10: (10,)}[kind]:
        wrong.append(f"{name} is memory of another kind of device")
    elif handle.device is not None and tensor.ordinal not in (-1, handle.device):
        wrong.append(f"{name} is memory of another device")
    if output and not tensor.writable:
        wrong.append(f"{name} is read-only")
    return wrong + address(name, tensor.pointer, tensor.size)


def address(name: str, pointer: Any, size: int) -> list[str]:
    if not isinstance(pointer, numbers.Integral) or isinstance(pointer, bool) or not 0 < pointer < 2**64:
        return [f"{name} is no address"]
    return [] if pointer % size == 0 else [f"{name} is not aligned"]


def param(
    name: str, value: Any, handle: Handle, dims: tuple[int, ...], allowed: set[DataType], output: bool
) -> tuple[list[str], Tensor | None]:
    tensor = tensor_of(value)
    if tensor is None:
        return [f"{name} is not an array of the four types"], None
    wrong = memory(name, tensor, handle, output)
    if tensor.dtype not in allowed:
        wrong.append(f"{name} has another type than parameters have")
    if [d for d in tensor.dims if d != 1] != [d for d in dims if d != 1]:
        return [*wrong, f"{name} has another shape than parameters have"], tensor
    expected = 1
    for d, s in zip(reversed(tensor.dims), reversed(tensor.strides), strict=True):
        if d != 1 and s != expected:
            wrong.append(f"{name} is not contiguous")
            break
        expected *= d
    return wrong, tensor


def parameter_dims(dims: tuple[int, ...], bn_mode: Mode) -> tuple[int, ...]:
    return tuple(d if i == 1 or (i > 1 and bn_mode == Mode.PER_ACTIVATION) else 1 for i, d in enumerate(dims))


def sharing(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> list[str]:
    """Outputs that share memory with anything else, and memory that ends beyond the address space."""
    wrong, unsure = [], False
    everything = [*((n, t, True) for n, t in outputs.items()), *((n, t, False) for n, t in inputs.items())]
    for name, tensor, _ in everything:
        if tensor.last >= 2**64:
            wrong.append(f"{name} ends beyond the address space")
    for (a, s, a_out), (b, t, b_out) in itertools.combinations(everything, 2):
        if not (a_out or b_out) or s.last <= t.pointer or t.last <= s.pointer:
            continue
        touched = [{o + byte for o in tensor.offsets() for byte in range(tensor.size)} for tensor in (s, t)]
        same = (s.pointer, s.dims, s.strides, s.size) == (t.pointer, t.dims, t.strides, t.size)
        if same and {a, b} in ({"x", "y"}, {"dx", "dy"}):  # some may be: tests/backends/test_in_place.py
            unsure = True
        elif touched[0] & touched[1]:
            wrong.append(f"{a} and {b} share memory")
        elif (s.dims, s.strides, s.size) != (t.dims, t.strides, t.size):
            unsure = True
    if unsure and not wrong:
        raise Unsure
    return wrong


def space(value: Any, need: int, cpu: bool, what: str = "workspace") -> tuple[list[str], Tensor | None]:
    """A workspace that is None or (address, bytes); other memory is not used by the fuzz."""
    if value is None:
        return ([] if need == 0 or cpu else [f"{what} is missing"]), None
    if not isinstance(value, tuple) or len(value) != 2:
        return [f"{what} is neither None nor (address, bytes)"], None
    for number in value:
        if isinstance(number, bool) or not isinstance(number, numbers.Integral) or not 0 <= number < 2**64:
            if number is None and number is value[0]:
                continue
            return [f"{what} is no address and size"], None
    start, size = (0 if v is None else int(v) for v in value)
    if start == 0 and size:
        return [f"{what} is NULL with a size"], None
    lent = Bytes(start, size) if size else None
    if need and not (start == 0 and cpu) and (size < need or start % 64):
        return [f"{what} is too small or not aligned"], lent
    return [], lent


class Bytes(Tensor):
    """A workspace."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        super().__init__((nbytes,), (1,), None, pointer)

    @property
    def size(self) -> int:
        return 1


# ---------------------------------------------------------------- descriptors


def descriptor(name: str, value: Any, backend: str) -> list[str]:
    if not isinstance(value, TensorDescriptor):
        return [f"{name} is no descriptor"]
    if value.closed:
        return [f"{name} is closed"]
    return [] if value.backend == backend else [f"{name} is another backend's"]


def operation(value: Any) -> Operation | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return next((o for o in Operation if value in (o.name, o.name.lower())), None)
    return next((o for o in Operation if isinstance(value, numbers.Integral) and int(value) == o.value), None)
