"""The local halves of synchronized batch norm on one device, against PyTorch's own functions for them.

``python -m benchmarks.sync_halves`` times what each rank computes before and after the collective. **Communication is
not in it**: both sides get two copies of their own message, as if another rank had the same data, by a copy on the
device. PyTorch's side is batch_norm_stats, batch_norm_gather_stats_with_counts and batch_norm_elemt, and
batch_norm_backward_reduce and batch_norm_backward_elemt, as ``torch.nn.SyncBatchNorm`` calls them on CUDA. Times are of
captured CUDA graphs, which have no host part, and of the plain calls. `benchmarks.sync` measures the whole, on several
devices.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pybnorm
from benchmarks.sync import SHAPES
from pybnorm._arrays import CUDA
from pybnorm.operations import ways
from pybnorm.sync import SyncBatchNorm

__all__ = ["main"]

_LARGEST = {"f32": 1e-5, "f16": 2.0**-9, "bf16": 2.0**-6, "sums": 1e-4}
"""Errors over the largest right value, of y and dx, and of dscale and dbias."""


class _Mirror:
    """A communicator of two ranks, the other one with this one's messages."""

    rank, size, devices = 0, 2, (CUDA,)

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def vector(self, values: np.ndarray[Any, Any], device_type: int, stream: int) -> Any:
        made = self.torch.from_numpy(values.copy()).cuda()
        self.torch.cuda.synchronize()
        return made

    def all_gather(self, send: Any, received: Any, stream: int) -> None:
        received.view(self.size, -1).copy_(send)

    def all_reduce(self, send: Any, received: Any, stream: int) -> None:
        self.torch.mul(send, float(self.size), out=received)

    def read(self, vector: Any, out: np.ndarray[Any, Any], stream: int) -> None:
        self.torch.from_numpy(out).copy_(vector)


def _ours(torch: Any, handle: Any, x: Any, dy: Any, deterministic: bool) -> tuple[Any, Any, dict[str, Any]]:
    channels, count = x.shape[1], x.numel() // x.shape[1]
    dtype = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[x.dtype]
    layer = SyncBatchNorm(handle, _Mirror(torch), channels, dtype, deterministic=deterministic, counts=[count] * 2)
    y, dx = torch.empty_like(x), torch.empty_like(x)
    scale, bias, mean, variance, own, inverse, dscale, dbias = (torch.ones(channels, device="cuda") for _ in range(8))
    running = {"running_mean": mean, "running_variance": variance}
    saved = {"saved_mean": own, "saved_inv_variance": inverse}
    nbytes = layer.workspace_size("forward", x, scale, bias, y, **running, **saved)
    nbytes = max(nbytes, layer.workspace_size("backward", x, dy, scale, dx, dscale, dbias, **saved))
    workspace = torch.empty(max(nbytes, 64), dtype=torch.uint8, device="cuda")

    def forward() -> None:
        layer.forward(x, scale, bias, y, **running, **saved, workspace=workspace)

    def backward() -> None:
        layer.backward(x, dy, scale, dx, dscale, dbias, **saved, workspace=workspace)

    results = {"y": y, "dx": dx, "dscale": dscale, "dbias": dbias, "nbytes": nbytes, "layer": layer}
    return forward, backward, results


def _theirs(torch: Any, x: Any, dy: Any) -> tuple[Any, Any, dict[str, Any]]:
    channels = x.shape[1]
    scale, bias, mean, variance = (torch.ones(channels, device="cuda") for _ in range(4))
    count = torch.full((1,), x.numel() // channels, dtype=torch.float32, device="cuda")
    gathered = torch.empty(2, 2 * channels + 1, device="cuda")
    results: dict[str, Any] = {}

    def forward() -> None:
        gathered.copy_(torch.cat([*torch.batch_norm_stats(x, 1e-5), count]))
        means, inverses, counts = torch.split(gathered, channels, dim=1)
        results["saved"] = torch.batch_norm_gather_stats_with_counts(
            x, means, inverses, mean, variance, 0.1, 1e-5, counts.view(-1)
        )
        results["counts"] = counts.to(torch.int32)
        results["y"] = torch.batch_norm_elemt(x, scale, bias, *results["saved"], 1e-5)

    def backward() -> None:
        saved = results["saved"]
        sums = torch.batch_norm_backward_reduce(dy, x, *saved, scale, True, True, True)
        total = torch.cat(sums[:2]) * 2.0
        results["dscale"], results["dbias"] = sums[2:]
        results["dx"] = torch.batch_norm_backward_elemt(
            dy, x, *saved, scale, *torch.split(total, channels), results["counts"]
        )

    return forward, backward, results


def _right(torch: Any, x: Any, dy: Any) -> dict[str, Any]:
    """In float64, scale and bias 1. Two ranks with the same data have its mean, variance and averages."""
    axes, wide_x, wide_dy = (0, 2, 3), x.double(), dy.double()
    variance, mean = torch.var_mean(wide_x, axes, correction=0, keepdim=True)
    normal = (wide_x - mean) * torch.rsqrt(variance + 1e-5)
    dbias, dscale = wide_dy.mean(axes, keepdim=True), (wide_dy * normal).mean(axes, keepdim=True)
    dx = (wide_dy - dbias - normal * dscale) * torch.rsqrt(variance + 1e-5)
    count = x.numel() // x.shape[1]
    return {"y": normal + 1, "dx": dx, "dscale": dscale.view(-1) * count, "dbias": dbias.view(-1) * count}


def _far(got: Any, want: Any) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def _captured(torch: Any, stream: Any, call: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def _microseconds(torch: Any, call: Callable[[], None], repeats: int, calls: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def _row(
    torch: Any, handle: Any, stream: Any, case: tuple[tuple[int, ...], str, str], options: argparse.Namespace
) -> tuple[float, bool, str]:
    shape, dtype, layout = case
    element = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    torch.manual_seed(0)
    x, dy = ((torch.randn(*shape, device="cuda") + far).to(element).contiguous(memory_format=memory) for far in (1, 0))
    sides = {"ours": _ours(torch, handle, x, dy, options.deterministic), "theirs": _theirs(torch, x, dy)}
    want, good, times = _right(torch, x, dy), True, {}
    errors = []
    for name, (forward, backward, results) in sides.items():
        for call in (forward, backward, forward, backward):
            call()
        torch.cuda.synchronize()
        if name == "ours":
            far = {n: _far(results[n], want[n]) for n in want}
            good = all(e <= _LARGEST[dtype if n in ("y", "dx") else "sums"] for n, e in far.items())
            errors = [f"{n} {e:.0e}" for n, e in far.items()]
        for which, call in (("forward", forward), ("backward", backward)):
            times[name, which, "calls"] = _microseconds(torch, call, 3, options.calls)
            times[name, which, "graph"] = _microseconds(torch, _captured(torch, stream, call), 5, options.calls)
    if options.verbose:
        for plan in sides["ours"][2]["layer"]._plans.values():
            steps = [plan.before, plan.after(plan.expected)]
            steps += [plan.elementwise] if hasattr(plan, "elementwise") else []
            for step in steps:
                print(f"    {plan.name}: {', '.join(step.calls)}")
    cells, ratios = [], {}
    for how in ("graph", "calls"):
        pairs = [[times[name, which, how] for which in ("forward", "backward")] for name in sides]
        ratios[how] = sum(pairs[0]) / sum(pairs[1])
        cells.append(" ".join(f"{a:.0f}/{b:.0f}" for a, b in pairs).rjust(24) + f"{ratios[how]:6.2f}")
    megabytes = sides["ours"][2]["nbytes"] / 2**20
    text = (
        f"{'x'.join(map(str, shape)):<15}{dtype:<5}{layout}" + "".join(cells) + f"{megabytes:8.1f}  {', '.join(errors)}"
    )
    return ratios["graph"], good, text + ("" if good else "  WRONG")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Parameters
    ----------
    arguments : sequence of str, optional
        Of the command line.

    Returns
    -------
    int
        0; 1 if a result is wrong, or nothing was measured.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_halves", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="start no further row after this time")
    parser.add_argument("--calls", type=int, default=20, help="calls per measurement")
    parser.add_argument("--deterministic", action="store_true", help="ours by ways whose bits repeat")
    for name, what in (("half", "halves in one pass each"), ("merge", "the merge of the statistics as one call")):
        text = f"{what}: as the table says (auto), wherever the library has them (fast), or nowhere (plain)"
        parser.add_argument(f"--{name}", choices=("auto", "fast", "plain"), default="auto", help=text)
    parser.add_argument("--skip", type=int, default=0, help="rows to leave out before the first")
    parser.add_argument("--verbose", action="store_true", help="list our calls of each row")
    options = parser.parse_args(arguments)
    ways.TAKEN.update(half=options.half, merge=options.merge)
    torch = importlib.import_module("torch")
    stream = torch.cuda.Stream()
    cases = [(s, d, y) for s in SHAPES for d in ("f32", "f16", "bf16") for y in ("nchw", "nhwc")][options.skip :]
    found, good, start = [], True, time.monotonic()
    with pybnorm.Handle("cudnn", stream=stream.cuda_stream) as handle, torch.cuda.stream(stream):
        version = ".".join(map(str, handle.library.version))
        print(f"{torch.cuda.get_device_name()}, cuDNN {version}, PyTorch {torch.__version__}")
        print("local halves on one device; communication is NOT in it")
        print("microseconds of forward/backward, ours then PyTorch's, and ours : PyTorch of both together")
        print(f"{'shape':<15}{'':<9}{'CUDA graphs':>24}{'':6}{'calls':>24}{'':6}{'MiB':>8}  largest errors of ours")
        for number, case in enumerate(cases):
            if time.monotonic() - start > options.seconds:
                print(f"left out for time: {len(cases) - number} of {len(cases)} rows")
                break
            ratio, right, text = _row(torch, handle, stream, case, options)
            found.append(ratio)
            good = good and right
            print(text, flush=True)
    if not found:
        print("nothing was measured: give --seconds more time")
        return 1
    mean = math.exp(statistics.fmean(map(math.log, found)))
    print(f"graphs, ours : PyTorch: geometric mean {mean:.2f}, highest {max(found):.2f}, of {len(found)} rows")
    print("every result is right" if good else "results are WRONG in the rows that say so")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
