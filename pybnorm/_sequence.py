"""Several neutral operations that make one call of a vendor's interface: their scratch, their workspace, their run.

What the modules named after other systems (`pybnorm.cann`, `pybnorm.directml`) share. A call is built first, which
checks every argument and every operation and touches no memory, and run afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pybnorm import _arguments
from pybnorm._arrays import CPU, Buffer
from pybnorm._core import Handle
from pybnorm.enums import DataType
from pybnorm.errors import WorkspaceError
from pybnorm.operations.preparation import prepare_named
from pybnorm.operations.program import ALIGNMENT, Prepared

__all__ = ["Scratch", "Sequence", "data_buffer", "disjoint"]

_ALIGNMENT = ALIGNMENT


class Scratch(NamedTuple):
    """A dense array in the scratch of a `Sequence`, of which only the place is known before the run."""

    offset: int
    dims: tuple[int, ...]
    dtype: DataType
    strides: tuple[int, ...]

    def at(self, address: int, handle: Handle) -> Buffer:
        """The array, with the scratch at `address`."""
        device = -1 if handle.device is None else handle.device
        kind = handle.library.device_type
        return Buffer(address + self.offset, self.dims, self.strides, self.dtype, kind, device, True, None)

    def view(self, dims: tuple[int, ...]) -> Scratch:
        """The first elements in another shape."""
        return self._replace(dims=dims, strides=_arguments.packed_strides(dims))


class Sequence:
    """Operations in order, with scratch arrays between them.

    Parameters
    ----------
    handle : Handle
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = _checked(handle)
        self._steps: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._scratch = 0

    def scratch(self, dims: tuple[int, ...], dtype: DataType = DataType.FLOAT32) -> Scratch:
        """A new array; its memory is undefined until a step writes it."""
        return self._add(dims, dtype, _arguments.packed_strides(dims))

    def scratch_like(self, array: Buffer) -> Scratch:
        """A new array with the dims, dtype and memory order of another one, without its gaps."""
        strides, step = [0] * len(array.dims), 1
        for a in sorted(range(len(array.dims)), key=lambda a: (array.strides[a], -a)):
            strides[a] = step
            step *= array.dims[a]
        return self._add(array.dims, array.dtype, tuple(strides))

    def _add(self, dims: tuple[int, ...], dtype: DataType, strides: tuple[int, ...]) -> Scratch:
        array = Scratch(self._scratch, dims, dtype, strides)
        self._scratch += _aligned(_arguments.numel(dims) * dtype.itemsize)
        return array

    def then(self, operation: str, *arguments: Any, **options: Any) -> None:
        """Append ``operations.<operation>(handle, *arguments, **options)``."""
        self._steps.append((operation, arguments, options))

    def check(self) -> int:
        """Check every step as the operations do, without touching memory; the bytes of workspace that a run needs."""
        return self._scratch + max([prepared.nbytes for prepared, *_ in self._prepared(0)], default=0)

    def run(self, workspace: Any = None) -> None:
        """Perform the steps.

        Parameters
        ----------
        workspace : array, (address, bytes) or None
            As in `pybnorm.operations`. With None on a CPU backend scratch arrays live for this call only.

        Raises
        ------
        WorkspaceError
            Too small or misaligned; nothing has been written then.
        """
        address, given = self.handle.memory(workspace)
        if address == 0 and self.handle.library.device_type == CPU:
            memory = np.empty(self._scratch + _ALIGNMENT, np.uint8)
            start = memory.ctypes.data
            self._execute(start + -start % _ALIGNMENT, None)
            return
        need = self.check()
        if given < need or (need and address % _ALIGNMENT):
            raise WorkspaceError(
                "workspace",
                f"{given} bytes at {address:#x}",
                f"at least {need} bytes, aligned to {_ALIGNMENT}, on the handle's device",
            )
        rest = (address + self._scratch, given - self._scratch) if given > self._scratch else None
        self._execute(address, rest)

    def _prepared(self, address: int) -> list[tuple[Prepared, tuple[int, ...], list[Any], str]]:
        """Every step, checked."""
        return [
            (*prepare_named(self.handle, name, *arguments, **options), name)
            for name, arguments, options in self._placed(address)
        ]

    def _execute(self, address: int, workspace: Any) -> None:
        """Run the steps; one that is refused must not leave the earlier ones' writes behind."""
        steps = self._prepared(address)
        for prepared, addresses, *_ in steps:
            prepared.check(addresses)
        for prepared, addresses, _held, name in steps:
            prepared.execute(self.handle, name, addresses, workspace)

    def _placed(self, address: int) -> list[tuple[str, list[Any], dict[str, Any]]]:
        def place(value: Any) -> Any:
            return value.at(address, self.handle) if type(value) is Scratch else value

        return [
            (name, [place(a) for a in arguments], {key: place(o) for key, o in options.items()})
            for name, arguments, options in self._steps
        ]


def _checked(handle: Handle) -> Handle:
    _arguments.instance(handle, Handle, "handle", "a Handle")
    return handle


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def data_buffer(handle: Handle, array: Any, argument: str, *, output: bool = False) -> Buffer:
    """An array that the handle's calls can reach, of positive strides that do not overlap; axes may be empty."""
    buffer = _checked(handle).buffer(array, argument, output=output)
    if 0 in buffer.dims:
        return buffer
    steps = tuple(max(1, s) if d == 1 else s for d, s in zip(buffer.dims, buffer.strides, strict=True))
    _arguments.strides(steps, buffer.dims, argument)
    return buffer._replace(strides=steps)


def disjoint(outputs: Mapping[str, Buffer | None], inputs: Mapping[str, Buffer | None]) -> None:
    """No output shares memory with an input or another output; the error has the caller's names.

    Raises
    ------
    ArgumentError
    """
    _arguments.disjoint(_regions(outputs), _regions(inputs))


def _regions(arrays: Mapping[str, Buffer | None]) -> list[_arguments.Region]:
    return [
        _arguments.Region(name, b.pointer, b.dims, tuple(s * b.dtype.itemsize for s in b.strides), b.dtype.itemsize)
        for name, b in arrays.items()
        if b is not None and 0 not in b.dims
    ]
