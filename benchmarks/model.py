"""A whole model: the steps of a ResNet-50 with PyTorch's batch norm and with ours, turn by turn in one process.

Contenders are PyTorch's model, the same while `pybnorm.torch.install` is in force, after `pybnorm.torch.convert`, and
after that with ``fuse=True``, each eager or, except the second, through ``torch.compile``. A step of training is
forward, cross entropy, backward and SGD; one of evaluation is forward without gradients. 16-bit dtypes are those of
autocast. Times are wall times between two waits for the device, so they have the host's share, of which small models
mostly consist. First every contender makes one step of equal models on equal data, and a loss that is not PyTorch's
within the dtype's noise is a failure.

The model is torchvision's where it is installed, else the same written here.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.case import one_line
from benchmarks.machine import optional
from pybnorm.errors import ArgumentError, NotInitializedError

__all__ = ["CONTENDERS", "SETTINGS", "Setting", "render", "run"]

CONTENDERS = ("torch", "installed", "pybnorm", "fused")
TOLERANCES = {"f32": 2e-3, "f16": 2e-2, "bf16": 5e-2}
"""Of the loss of a first step, relative to PyTorch's."""
ROUNDS, SMALL_ROUNDS = 5, 15

Row = dict[str, Any]


class Setting(NamedTuple):
    """What is measured."""

    name: str
    batch: int
    size: int
    dtype: str
    layout: str
    training: bool
    compiled: str = ""
    """The mode of ``torch.compile``; empty: eager."""


SETTINGS = {
    s.name: s
    for s in (
        *(Setting(f"train-{d}-{y}", 128, 224, d, y, True) for y in ("nhwc", "nchw") for d in ("f32", "f16", "bf16")),
        *(Setting(f"eval-{d}-nhwc", 128, 224, d, "nhwc", False) for d in ("f32", "bf16")),
        *(Setting(f"compiled-{d}-nhwc", 128, 224, d, "nhwc", True, "default") for d in ("f32", "bf16")),
        Setting("graphed-bf16-nhwc", 128, 224, "bf16", "nhwc", True, "reduce-overhead"),
        Setting("small-f32-nchw", 2, 64, "f32", "nchw", True),
        Setting("small-bf16-nhwc", 2, 64, "bf16", "nhwc", True),
        Setting("small-graphed-bf16-nhwc", 2, 64, "bf16", "nhwc", True, "reduce-overhead"),
    )
}
"""By name: large batches, evaluation, compiled, compiled with CUDA graphs, and small steps whose time is the host's."""


def run(
    names: Sequence[str] = (),
    *,
    contenders: Sequence[str] = CONTENDERS,
    quick: bool = False,
    seconds: float = float("inf"),
    progress: Callable[[str, int], object] = lambda text, total: None,
) -> dict[str, Any]:
    """Measure.

    Parameters
    ----------
    names : sequence of str
        Of `SETTINGS`; by default all on a GPU, the small ones on the CPU.
    contenders : sequence of str
        Of `CONTENDERS`; ``"torch"``, which the ratios are over, is always one.
    quick : bool
        A narrow model of four blocks, two images of 32x32 and two rounds: to see that all of it works.
    seconds : float
        After this time no other setting is begun; what is left out is listed.
    progress : callable
        Called with a text and the number of texts that will come.

    Returns
    -------
    dict
        ``device``, ``torch``, ``model``; ``rows``, each with the setting, and ``contenders`` by name with ``seconds``
        (the median), ``spread`` (largest over smallest), ``ratio`` (PyTorch's time over its own) and ``loss``, or
        ``failure``, or ``unsupported``, the reason; the one installed has ``left``, the calls of a step that PyTorch's
        own kernels computed all the same. ``left_out``; ``good`` (nothing of ours failed).

    Raises
    ------
    ArgumentError
        Naming the argument.
    NotInitializedError
        PyTorch is not installed.
    """
    for argument, given, known in (("names", names, SETTINGS), ("contenders", contenders, CONTENDERS)):
        for name in given:
            if name not in known:
                raise ArgumentError(argument, name, ", ".join(known))
    torch = optional("torch")
    if torch is None:
        text = "the model is PyTorch's, which is not installed: pip install torch"
        raise NotInitializedError(backend="torch", function="import", status=0, status_name="not installed", text=text)
    start, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    default = [n for n, s in SETTINGS.items() if device == "cuda" or (n.startswith("small") and not s.compiled)]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": "a narrow network"
        if quick
        else "torchvision"
        if optional("torchvision")
        else "ResNet-50 of benchmarks",
        "rows": [],
        "left_out": [],
    }
    todo = [SETTINGS[name] for name in names or default]
    for setting in todo:
        progress(setting.name, len(todo))
        if time.monotonic() - start > seconds:
            result["left_out"].append({"case": setting.name, "reason": f"after {seconds:g} s"})
            continue
        chosen = tuple(dict.fromkeys(("torch", *contenders)))
        used = setting._replace(batch=2, size=32) if quick else setting
        result["rows"].append(_row(torch, device, used, chosen, quick))
    result["good"] = bool(result["rows"]) and not any(
        "failure" in found for row in result["rows"] for found in row["contenders"].values()
    )
    return result


def _row(torch: Any, device: str, setting: Setting, names: Sequence[str], quick: bool) -> Row:
    torch.manual_seed(0)
    layout = torch.channels_last if setting.layout == "nhwc" else torch.contiguous_format
    plain = (_narrow(torch) if quick else _resnet50(torch)).to(device, memory_format=layout)
    images = torch.randn(setting.batch, 3, setting.size, setting.size, device=device).to(memory_format=layout)
    labels = torch.randint(0, 10, (setting.batch,), device=device)
    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, Row] = {}
    for name in names:
        reason = _unsupported(torch, device, setting) if name == "installed" else None
        if reason is not None:
            found[name] = {"unsupported": reason}
            continue
        try:
            steps[name] = _step(torch, device, setting, _made(name, copy.deepcopy(plain)), images, labels)
            # TF32 rounds what convolutions are given to 11 bits, which few images make a part of the loss.
            with _around(name, device), _Left() as left, torch.backends.cudnn.flags(allow_tf32=False):
                found[name] = {"loss": float(steps[name]())}
            if name == "installed":
                found[name]["left"] = left.count
            right = found[names[0]].get("loss", float("nan"))
            error = abs(found[name]["loss"] - right) / abs(right)
            if not error <= TOLERANCES[setting.dtype]:
                raise ArithmeticError(f"the loss is {found[name]['loss']:.6g}, PyTorch's {right:.6g}")
        except Exception as error:  # of any of the libraries; the others are measured
            steps.pop(name, None)
            found[name] = {"failure": one_line(error)}
    rounds = 2 if quick else SMALL_ROUNDS if setting.name.startswith("small") else ROUNDS
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):  # one more, which is not counted: caches, plans and compilers
        for name, step in steps.items():
            with _around(name, device):
                _wait(torch, device)
                begin = time.perf_counter()
                step()
                _wait(torch, device)
                passed = time.perf_counter() - begin
            if turn >= 0:
                times[name].append(passed)
    for name, measured in times.items():
        middle = statistics.median(measured)
        found[name] |= {"seconds": middle, "spread": max(measured) / min(measured)}
        if "torch" in times:
            found[name]["ratio"] = statistics.median(times["torch"]) / middle
    return {"setting": setting._asdict(), "contenders": found}


def _made(name: str, model: Any) -> Any:
    if name in ("torch", "installed"):
        return model
    import pybnorm.torch

    return pybnorm.torch.convert(model, fuse=name == "fused")


def _around(name: str, device: str) -> contextlib.AbstractContextManager[object]:
    """What a contender's steps are made in; the others' are not."""
    if name != "installed":
        return contextlib.nullcontext()
    import pybnorm.torch

    return pybnorm.torch.install(cuda=device == "cuda")


def _unsupported(torch: Any, device: str, setting: Setting) -> str | None:
    """Why replaced kernels are not measured."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        return "install() needs PyTorch 2.10"
    if setting.compiled:
        return "torch.compile makes code of its own in place of kernels"
    if device == "cuda" and torch.version.cuda is None:
        return "install() has no kernels for ROCm"
    return None


class _Left(logging.Handler):
    """Counts, in a ``with`` block, the calls that `pybnorm.torch.install` left to PyTorch's own kernels."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count, self.logger = 0, logging.getLogger("pybnorm.torch")

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1

    def __enter__(self) -> _Left:
        self.level_before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


def _step(torch: Any, device: str, setting: Setting, model: Any, images: Any, labels: Any) -> Callable[[], Any]:
    model.train(setting.training)
    called = torch.compile(model, mode=setting.compiled) if setting.compiled else model
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(setting.dtype)
    criterion, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss() -> Any:
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return criterion(called(images).float(), labels)

    def train() -> Any:
        optimizer.zero_grad(set_to_none=True)
        if setting.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        found = loss()
        found.backward()
        optimizer.step()
        return found.detach()

    def evaluate() -> Any:
        with torch.no_grad():
            return loss()

    return train if setting.training else evaluate


def _wait(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- models


def _resnet50(torch: Any) -> Any:
    torchvision = optional("torchvision")
    return _network(torch, (3, 4, 6, 3), 64) if torchvision is None else torchvision.models.resnet50()


def _narrow(torch: Any) -> Any:
    return _network(torch, (1, 1, 1, 1), 4)


def _network(torch: Any, depths: Sequence[int], width: int) -> Any:
    """A residual network of bottlenecks (He et al. 2016; the stride in the 3x3 convolution), as torchvision has it."""
    nn = torch.nn

    class Bottleneck(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, given: int, inner: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner)
            self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(inner)
            self.conv3, self.bn3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
            self.relu, self.downsample = nn.ReLU(inplace=True), None
            if stride != 1 or given != 4 * inner:
                shortcut = nn.Conv2d(given, 4 * inner, 1, stride, bias=False)
                self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * inner))

        def forward(self, x: Any) -> Any:
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.relu(self.bn2(self.conv2(out)))
            out = self.bn3(self.conv3(out))
            out += x if self.downsample is None else self.downsample(x)
            return self.relu(out)

    stem = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    parts: list[Any] = [*stem, nn.MaxPool2d(3, 2, 1)]
    given = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for block in range(depth):
            parts.append(Bottleneck(given, inner, 2 if stage and not block else 1))
            given = 4 * inner
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 1000))


def render(result: dict[str, Any]) -> str:
    """The result as text: milliseconds, and PyTorch's time over each."""
    lines = [f"{result['device']}, PyTorch {result['torch']}, {result['model']}; ms, (PyTorch's time over it), spread"]
    for row in result["rows"]:
        setting, shown = row["setting"], []
        for name, found in row["contenders"].items():
            if "failure" in found:
                shown.append(f"{name}: {found['failure']}")
            elif "unsupported" in found:
                shown.append(f"{name}: n/s, {found['unsupported']}")
            else:
                ratio = f" ({found['ratio']:.2f})" if "ratio" in found and name != "torch" else ""
                left = f", {found['left']} calls left to PyTorch" if found.get("left") else ""
                shown.append(f"{name} {1e3 * found['seconds']:.2f}{ratio} x{found['spread']:.2f}{left}")
        shape = f"{setting['batch']}x{setting['size']}x{setting['size']}"
        lines.append(f"{setting['name']:<24} {shape:<12} " + "   ".join(shown))
    lines += [f"left out: {one['case']}, {one['reason']}" for one in result["left_out"]]
    return "\n".join(lines)
