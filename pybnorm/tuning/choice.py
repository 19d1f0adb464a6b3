"""The choice of a plan: its candidates, the winner, and the key by which the choice is remembered."""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Mapping
from typing import Any

import pybnorm
from pybnorm import _arguments, _core, devices
from pybnorm._arrays import CUDA
from pybnorm.check import calls
from pybnorm.defects import _of_library
from pybnorm.enums import Operation
from pybnorm.errors import ArgumentError, ArgumentTypeError, PybnormError
from pybnorm.tuning import cache, trials
from pybnorm.tuning.cache import Entry
from pybnorm.tuning.trials import NotMeasuredError, Task, Tensor, Trial

__all__ = ["MARGIN", "choose"]

MARGIN = 0.02
"""Share of the time of the rules' choice that another must save to replace it."""
_log = logging.getLogger("pybnorm.tuning")


def choose(
    handle: _core.Handle, operation: Operation, x: Any, algorithm: str, options: Mapping[str, Any]
) -> tuple[Any, str]:
    """The fastest plan by measurement, and why.

    Parameters
    ----------
    handle : Handle
    operation : Operation
        FORWARD_TRAINING, FORWARD_INFERENCE or BACKWARD.
    x : TensorDescriptor or array
    algorithm : str
        ``"auto"`` or ``"fast"``, whose candidates are measured.
    options : mapping
        The other arguments of the handle's ``plan_`` method.

    Returns
    -------
    plan : Plan
        Of `handle`.
    reason : str

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An algorithm by name; the handle's stream is being captured; whatever the ``plan_`` method raises.
    LibraryNotFoundError
        CUDA without the packages ``cuda-core`` and ``cuda-bindings``, which measuring and the device's name take.
    """
    if not isinstance(algorithm, str):
        raise ArgumentTypeError("algorithm", algorithm, "a string")
    if algorithm not in ("auto", "fast"):
        raise ArgumentError(
            "algorithm", algorithm, "'auto' or 'fast' with tune=True, which measures what they may take"
        )
    make = functools.partial(getattr(handle, trials.METHODS[operation]), x, **options)
    plan = make(algorithm=algorithm)
    names = _core.candidates(plan, algorithm == "fast")
    if len(names) < 2:
        return plan, f"{plan.reason}; nothing to measure it against{_left_alone(handle)}"
    known = ("running", "saved", "unbiased", *_others(operation), *calls.OPTIONS[operation])
    strange = [
        name
        for name, value in options.items()
        if name not in known and value is not None and not (isinstance(value, int) and value == 0)
    ]
    if strange:
        return plan, f"{plan.reason}; not measured: with {', '.join(strange)} there is nothing to judge by"
    own = plan.algorithm.partition("+")[0]  # "dense+spatial" is the algorithm "dense"
    names = names if own in names else (own, *names)
    task = _task(handle, operation, x, options)
    key = _key(handle, algorithm, task)

    def chosen(entry: Entry) -> Any:
        return plan if entry["algorithm"] == own else make(algorithm=entry["algorithm"])

    def remembered() -> tuple[Any, str] | None:
        entry = cache.store.get(key)
        if entry is None or entry["algorithm"] not in names:
            return None
        try:
            return chosen(entry), f"{_reason(entry)}; remembered"
        except PybnormError as error:
            _log.warning("%s was remembered and can no longer be built (%s); measuring", entry["algorithm"], error)
            return None

    if (found := remembered()) is not None:
        return found
    with cache.store.measuring:  # two measurements at once would disturb each other
        if (found := remembered()) is not None:  # by another thread, meanwhile
            return found
        if _capturing(handle):
            raise ArgumentError(
                "tune", True, "False while the handle's stream is captured into a graph: plan, or tune, before"
            )
        entry = _measured(handle, task, names, own, key)
        if isinstance(entry, str):
            return plan, f"{plan.reason}; not measured: {entry}"[:500]
        cache.store.put(key, entry)
    return chosen(entry), _reason(entry)


def _left_alone(handle: _core.Handle) -> str:
    """Why a library's own tuning is not asked for, where it has one: what it keeps, every later program takes."""
    found = [d.id for d in _of_library(handle.library, tuned=True) if d.tuned]
    if not found:
        return ""
    return f"; the library's own tuning is left alone, as it keeps what is fastest, right or wrong ({', '.join(found)})"


def _others(operation: Operation) -> list[str]:
    """The data tensors of a call but x."""
    return [tensor.name for tensor in calls.TENSORS[operation] if tensor.data and tensor.name != "x"]


def _measured(handle: _core.Handle, task: Task, names: tuple[str, ...], own: str, key: str) -> Entry | str:
    """What is remembered of a measurement, or why there is none."""
    _log.info("measuring %s for %s", ", ".join(names), key)
    try:
        found = trials.run(task, handle.backend, handle.device or 0, names, own)
    except NotMeasuredError as error:
        return str(error)
    except PybnormError:
        raise
    except Exception as error:  # of cuda.core, whose classes differ between releases: no memory, a lost context
        _log.warning("measuring failed", exc_info=True)
        return f"{type(error).__name__}: {error}"
    entry = _decision(found, own)
    if entry is None:
        notes = "; ".join(f"{name}: {trial.note}" for name, trial in found.items())
        return f"no candidate ran within its bound ({notes})"
    return entry


def _decision(trials: Mapping[str, Trial], own: str) -> Entry | None:
    """What is remembered of the trials; None if none was timed."""
    times = {name: trial.seconds for name, trial in trials.items() if trial.seconds is not None}
    if not times:
        return None
    best = min(times, key=lambda name: times[name])
    rule = times.get(own)
    if rule is not None and times[best] > rule * (1 - MARGIN):
        best = own
    return {
        "algorithm": best,
        "seconds": times[best],
        "rule": own,
        "rule_seconds": rule,
        "trials": {n: t.seconds if t.seconds is not None else t.note for n, t in trials.items()},
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _reason(entry: Entry) -> str:
    text = f"measured: {entry['seconds'] * 1e6:.1f} us"
    if entry["algorithm"] == entry["rule"]:
        return f"{text}, which no other way beats by {MARGIN:.0%}"
    if entry["rule_seconds"] is None:
        return f"{text}; {entry['rule']} (the rule's choice) did not run within its bound"
    return f"{text} against {entry['rule_seconds'] * 1e6:.1f} us of {entry['rule']} (the rule's choice)"


# ---------------------------------------------------------------- the problem and its key


def _task(handle: _core.Handle, operation: Operation, x: Any, options: Mapping[str, Any]) -> Task:
    """The problem in canonical form; the plan that the rules made has validated it."""
    tensors: dict[str, Tensor] = {}
    addresses = 0
    for name in ("x", *_others(operation)):
        given = x if name == "x" else options[name]
        if given is None:
            tensors[name] = tensors["x"]
            continue
        described = given
        if not isinstance(given, _core.TensorDescriptor):
            described = handle.descriptor(given, name)
            addresses |= handle.buffer(given, name).pointer
        tensors[name] = Tensor(described.dtype, described.dims, described.strides)
    kept: dict[str, Any] = {"mode": _arguments.mode(options["mode"])}
    for name, value in options.items():
        if name in ("running", "saved"):
            kept[name] = bool(value)
        elif name in calls.OPTIONS[operation] and name != "mode":
            kept[name] = float(value)
    first = tensors["x"]
    with (
        _core.TensorDescriptor(handle.backend, first.dtype, first.dims, first.strides) as x_desc,
        _core.derive_bn_tensor_descriptor(x_desc, kept["mode"]) as derived,
    ):
        parameter = Tensor(derived.dtype, derived.dims, derived.strides)
    return Task(operation, tensors, parameter, _alignment(addresses), kept)


def _alignment(addresses: int) -> int:
    """The largest power of two up to 16 that divides all of them; 16 where none is known."""
    bits = addresses | 16
    return bits & -bits


def _key(handle: _core.Handle, algorithm: str, task: Task) -> str:
    """One line that names what a measurement depends on."""
    library = handle.library
    device, driver = _device(library.device_type, handle.device or 0)
    words = [
        f"{handle.backend} {'.'.join(map(str, library.version))}",
        f"pybnorm {pybnorm.__version__}",
        device,
        driver,
        algorithm,
        task.operation.name.lower(),
    ]
    for name, tensor in task.tensors.items():
        if name == "x" or tensor != task.tensors["x"]:
            dims, strides = ("x".join(map(str, values)) for values in (tensor.dims, tensor.strides))
            words.append(f"{name} {tensor.dtype.short} {dims} strides {strides}")
    words.append(f"aligned {task.alignment}")
    for name, value in task.options.items():
        if name == "mode":
            words.append(value.name.lower())
        elif name.startswith(("alpha", "beta")):  # whether it blends, not by how much
            plain = 1.0 if name.startswith("alpha") else 0.0
            words.append(f"{name} {value:g}" if value in (0.0, 1.0) else f"{name} other") if value != plain else None
        elif name == "epsilon":  # what cuDNN's graphs can read as float32, or not
            words.append("epsilon" if value == 0 or value >= 2.0**-126 else "epsilon small")
        elif name in ("running", "saved"):
            words.append(f"{name} {int(value)}")
    return " | ".join(filter(None, words))


@functools.cache
def _device(device_type: int, ordinal: int) -> tuple[str, str]:
    """(name of a device, its driver)."""
    with trials.undisturbed(device_type):
        return devices.device_for(device_type, ordinal).name, devices.driver(device_type)


def _capturing(handle: _core.Handle) -> bool:
    if handle.library.device_type != CUDA:
        return False
    from pybnorm.devices import cuda

    return cuda.capturing(handle.stream)
