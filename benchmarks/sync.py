"""Throughput of `pybnorm.sync` against ``torch.nn.SyncBatchNorm``, and whether both are right, in one run.

``python -m benchmarks.sync --out DIR`` starts one process for each GPU; under ``torchrun`` it is one of them. Both
sides use the same tensors, NCCL process group and stream, and take turns. Ours is measured in four settings:

reads
    The counts of the ranks are part of each message and read on the host, as PyTorch reads them.
promised
    The counts are given to the constructor; nothing waits on the host.
fixed
    As ``promised``, in ways whose bits repeat.
module
    ``pybnorm.torch.SyncBatchNorm`` with autograd, as PyTorch's own is measured; its layer is that of ``reads``.

Rows are measured in an order in which every shape and dtype comes early, so that those left out for time are spread.
With ``--backend onednn`` the ranks are CPU processes over gloo. PyTorch has no synchronized batch norm on the CPU, so
this only shows that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import importlib
import itertools
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import pybnorm
from pybnorm import _core, _files, reference
from pybnorm._arrays import CPU
from pybnorm.errors import ArgumentError
from pybnorm.sync import SyncBatchNorm

__all__ = ["SHAPES", "SMALL_SHAPES", "main", "measure", "render", "rows_of", "verify"]

SHAPES = ((32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28), (32, 2048, 7, 7), (4, 256, 64, 64))
"""Of each rank: layers of an image network with an ordinary batch, and one of a detector with a small batch."""
SMALL_SHAPES = ((4, 64, 14, 14), (2, 256, 7, 7))
"""For CPUs."""
OURS = ("reads", "promised", "fixed", "module")
TIMEOUT_SECONDS = 120
_KINDS = {
    "sync-bench.json": _files.Kind("an earlier sync-bench.json", r'\{\s*"ranks": \d'),
    "sync-bench.txt": _files.Kind("an earlier sync-bench.txt", r"\d+ ranks, .*, PyTorch "),
}
"""The only files that are replaced."""


class _Rank:
    """This process: PyTorch, its process group, a handle, and how to time."""

    def __init__(self, backend: str, rank: int, size: int) -> None:
        self.torch = importlib.import_module("torch")
        self.group = importlib.import_module("torch.distributed")
        self.backend, self.rank, self.size = backend, rank, size
        self.gpu = _core.device_types(backend)[0] != CPU
        if self.gpu:
            self.torch.cuda.set_device(rank)
        self.device = f"cuda:{rank}" if self.gpu else "cpu"
        self.group.init_process_group(
            "nccl" if self.gpu else "gloo",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
        )
        self.stream = self.torch.cuda.Stream() if self.gpu else None
        self.handle = pybnorm.Handle(backend, stream=self.stream.cuda_stream if self.stream is not None else None)
        # One handle for the module too: each compiles what it calls, which takes longer than what is measured.
        self.ours = importlib.import_module("pybnorm.torch.sync")
        self.ours._handles[backend, rank if self.gpu else 0] = self.handle

    def close(self) -> None:
        self.handle.close()
        gc.collect()  # a layer in a traceback would keep the group's threads alive, and the process could not end
        self.group.barrier()
        self.group.destroy_process_group()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        with self.torch.cuda.stream(self.stream) if self.gpu else contextlib.nullcontext():
            yield

    def layer(self, channels: int, dtype: str, kind: str, counts: Sequence[int]) -> SyncBatchNorm:
        told = None if kind == "reads" else counts
        world = self.group.group.WORLD
        return SyncBatchNorm(self.handle, world, channels, dtype, deterministic=kind == "fixed", counts=told)

    def workspace(self, nbytes: int) -> Any:
        # PyTorch's CPU allocator aligns to 64 bytes, its CUDA allocator to 512.
        return self.torch.empty(max(nbytes, 64), dtype=self.torch.uint8, device=self.device)

    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """Seconds per call, from when all ranks are ready."""
        self.group.barrier()
        if not self.gpu:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls
        self.torch.cuda.synchronize()
        start_event, end_event = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        for _ in range(calls):
            call()
        end_event.record()
        end_event.synchronize()
        elapsed: float = start_event.elapsed_time(end_event)
        return elapsed * 1e-3 / calls


# ---------------------------------------------------------------- right


def verify(rank: _Rank, dtype: str, layout: str, kinds: Sequence[str] = OURS) -> list[dict[str, Any]]:
    """Forward and backward of uneven parts of one batch, both sides against the float64 reference of the whole.

    An error is the largest difference over the largest right value, over all ranks. Ours is good up to 4 times
    PyTorch's plus 16 roundoffs of float32, or one of 16-bit data; the tests of `pybnorm.sync` hold every element to its
    own bound.
    """
    torch = rank.torch
    element = _element(torch, dtype)
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    rows, channels = 4 * rank.size + 3, 96  # the last rank has 7 rows, the others 4
    generator = np.random.default_rng(0)
    shape = (rows, channels, 14, 14)
    offset = generator.normal(0, 3, (1, channels, 1, 1))
    # Rounded to the dtype first, so that both sides and the reference start from the same values.
    whole_x, whole_dy = (
        torch.from_numpy(generator.standard_normal(shape) + shift).to(element) for shift in (offset, 0.0)
    )
    x64, dy64 = whole_x.double().numpy(), whole_dy.double().numpy()
    vectors = [generator.uniform(0.5, 1.5, channels).astype(np.float32) for _ in range(4)]
    scale, bias, mean, variance = (v.reshape(1, channels, 1, 1) for v in vectors)
    options: dict[str, Any] = {"epsilon": 1e-5, "exponential_average_factor": 0.25}
    right = reference.forward_training(x64, scale, bias, running_mean=mean, running_variance=variance, **options)
    expected = {
        "y": right.y,
        "dx": reference.backward(x64, dy64, scale, epsilon=1e-5).dx,
        "running_mean": right.running_mean,
        "running_variance": right.running_variance,
    }
    bounds = [4 * r for r in range(rank.size)] + [rows]
    part = slice(bounds[rank.rank], bounds[rank.rank + 1])

    def errors(got: dict[str, Any]) -> dict[str, float]:
        worst = []
        for name, value in got.items():
            want = expected[name]
            assert want is not None
            want_here = want[part] if name in ("y", "dx") else want.ravel()
            difference = np.abs(value.detach().double().cpu().numpy() - want_here)
            worst.append(float(difference.max()) / float(np.abs(want).max()))
        over_ranks = torch.tensor(worst, dtype=torch.float64, device=rank.device)
        rank.group.all_reduce(over_ranks, op=rank.group.ReduceOp.MAX)
        return dict(zip(got, over_ranks.tolist(), strict=True))

    def fresh() -> list[Any]:
        return [torch.from_numpy(v.copy()).to(rank.device) for v in vectors]

    results = []
    with rank.on_stream():
        x, dy = (w[part].to(rank.device).contiguous(memory_format=memory) for w in (whole_x, whole_dy))
        theirs = errors(_pytorch(rank, x, dy, fresh(), whole_x, whole_dy, part))
        for kind in kinds:
            vectors_here = fresh()
            if kind == "module":
                got = _by_module(rank.ours.SyncBatchNorm, rank, x, dy, vectors_here)
            else:
                got = _by_layer(
                    rank, dtype, kind, [(b - a) * 196 for a, b in itertools.pairwise(bounds)], x, dy, vectors_here
                )
            ours = errors(got)
            allowance = {"y": _ALLOWANCE[dtype], "dx": _ALLOWANCE[dtype]}
            good = all(e <= 4 * theirs[n] + allowance.get(n, _ALLOWANCE["f32"]) for n, e in ours.items())
            results.append(
                {"dtype": dtype, "layout": layout, "kind": kind, "errors": ours, "torch": theirs, "good": good}
            )
    return results


def _by_layer(
    rank: _Rank, dtype: str, kind: str, counts: list[int], x: Any, dy: Any, vectors: list[Any]
) -> dict[str, Any]:
    """Results of `pybnorm.sync`, of memory that has NaN before."""
    torch = rank.torch
    weight, shift, running_mean, running_variance = vectors
    layer = rank.layer(len(weight), dtype, kind, counts)
    options: dict[str, Any] = {"epsilon": 1e-5, "exponential_average_factor": 0.25}
    running = {"running_mean": running_mean, "running_variance": running_variance}
    saved = {name: torch.empty_like(weight) for name in ("saved_mean", "saved_inv_variance")}
    y, dx = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    nbytes = layer.workspace_size("forward", x, weight, shift, y, **options, **running, **saved)
    nbytes = max(nbytes, layer.workspace_size("backward", x, dy, weight, dx, **saved))
    workspace = rank.workspace(nbytes)
    layer.forward(x, weight, shift, y, **options, **running, **saved, workspace=workspace)
    layer.backward(x, dy, weight, dx, **saved, workspace=workspace)
    return {"y": y, "dx": dx} | running


# 16 roundoffs of float32, in which statistics are kept and summed; one of a 16-bit result.
_ALLOWANCE = {"f32": 2.0**-20, "f16": 2.0**-11, "bf16": 2.0**-8}


def _element(torch: Any, dtype: str) -> Any:
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]


def _pytorch(rank: _Rank, x: Any, dy: Any, vectors: list[Any], whole_x: Any, whole_dy: Any, part: slice) -> Any:
    """PyTorch's results: its SyncBatchNorm, or on the CPU its batch norm of the whole batch."""
    torch = rank.torch
    scale, bias, mean, variance = vectors
    if rank.gpu:
        return _by_module(torch.nn.SyncBatchNorm, rank, x, dy, vectors)
    leaf = whole_x.clone().requires_grad_()
    y = torch.nn.functional.batch_norm(leaf, mean, variance, scale, bias, True, 0.25, 1e-5)
    (dx,) = torch.autograd.grad(y, leaf, whole_dy)
    return {"y": y[part], "dx": dx[part], "running_mean": mean, "running_variance": variance}


def _by_module(kind: Any, rank: _Rank, x: Any, dy: Any, vectors: list[Any]) -> dict[str, Any]:
    """Results of a synchronized module, PyTorch's or ours."""
    torch = rank.torch
    scale, bias, mean, variance = vectors
    module = kind(len(scale), eps=1e-5, momentum=0.25).to(rank.device)
    module.weight.data, module.bias.data = scale, bias
    module.running_mean, module.running_var = mean, variance
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    return {"y": y, "dx": dx, "running_mean": mean, "running_variance": variance}


# ---------------------------------------------------------------- fast


def measure(
    rank: _Rank, shape: Sequence[int], dtype: str, layout: str, repeats: int, calls: int, kinds: Sequence[str] = OURS
) -> dict[str, Any]:
    """Times of forward and backward of each side; the slowest rank counts, and the median of all measurements."""
    torch = rank.torch
    element = _element(torch, dtype)
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    sides: dict[str, dict[str, Callable[[], object]]] = {}
    with rank.on_stream():
        torch.manual_seed(rank.rank)
        x = torch.randn(*shape, device=rank.device).to(element).contiguous(memory_format=memory)
        dy = torch.randn(*shape, device=rank.device).to(element).contiguous(memory_format=memory)
        y, dx = torch.empty_like(x), torch.empty_like(x)
        channels, elements = shape[1], math.prod(shape) // shape[1]
        parameters = [torch.ones(channels, device=rank.device) for _ in range(8)]
        scale, bias, mean, variance, saved_mean, saved_inv, dscale, dbias = parameters
        running = {"running_mean": mean, "running_variance": variance}
        saved = {"saved_mean": saved_mean, "saved_inv_variance": saved_inv}
        extra = {}
        for kind in (k for k in kinds if k != "module"):
            layer = rank.layer(channels, dtype, kind, [elements] * rank.size)
            nbytes = layer.workspace_size("forward", x, scale, bias, y, **running, **saved)
            nbytes = max(nbytes, layer.workspace_size("backward", x, dy, scale, dx, dscale, dbias, **saved))
            workspace = rank.workspace(nbytes)
            extra[kind] = nbytes + layer.nbytes
            sides[kind] = {
                "forward": lambda layer=layer, w=workspace: layer.forward(  # type: ignore[misc]
                    x, scale, bias, y, **running, **saved, workspace=w
                ),
                "backward": lambda layer=layer, w=workspace: layer.backward(  # type: ignore[misc]
                    x, dy, scale, dx, dscale, dbias, **saved, workspace=w
                ),
            }
        modules = {"module": rank.ours.SyncBatchNorm} if "module" in kinds else {}
        modules |= {"torch": torch.nn.SyncBatchNorm} if rank.gpu else {}
        for name, kind in modules.items():
            module = kind(channels).to(rank.device)
            leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            output, wanted = module(leaf), (leaf, module.weight, module.bias)
            sides[name] = {
                "forward": functools.partial(module, leaf),
                "backward": functools.partial(torch.autograd.grad, output, wanted, dy, retain_graph=True),
            }
        times: dict[tuple[str, str], list[float]] = {}
        for side in sides.values():
            for call in side.values():
                for _ in range(3):
                    call()
        for _ in range(repeats):
            for name, side in sides.items():
                for which, call in side.items():
                    times.setdefault((name, which), []).append(rank.seconds(call, calls))
    medians = torch.tensor([statistics.median(t) for t in times.values()], dtype=torch.float64, device=rank.device)
    rank.group.all_reduce(medians, op=rank.group.ReduceOp.MAX)
    seconds: dict[str, dict[str, float]] = {}
    for (name, which), value in zip(times, medians.tolist(), strict=True):
        seconds.setdefault(name, {})[which] = value
    row: dict[str, Any] = {"shape": list(shape), "dtype": dtype, "layout": layout, "seconds": seconds}
    row["extra_bytes"] = extra
    if "torch" in seconds:
        theirs = seconds["torch"]
        row["ratios"] = {kind: {w: seconds[kind][w] / theirs[w] for w in theirs} for kind in kinds}
        both = sum(theirs.values())
        for kind in kinds:
            row["ratios"][kind]["both"] = sum(seconds[kind].values()) / both
    return row


# ---------------------------------------------------------------- all of it


def render(result: dict[str, Any]) -> str:
    """The result as plain tables."""
    lines = [f"{result['ranks']} ranks, {result['device']}, {result['library']}, PyTorch {result['torch']}"]
    lines.append("largest error over largest value, against float64 of the whole; in brackets PyTorch's")
    for row in result["correctness"]:
        listed = ", ".join(f"{n} {e:.1e} ({row['torch'][n]:.1e})" for n, e in row["errors"].items())
        mark = "" if row["good"] else "  WRONG"
        lines.append(f"{row['dtype']:<5}{row['layout']:<5}{row['kind']:<9}{listed}{mark}")
    lines.append("microseconds of forward/backward; in brackets ours : PyTorch of both together")
    kinds = _kinds(result)
    lines.append(f"{'shape of a rank':<18}{'':<10}" + "".join(f"{kind:>26}" for kind in kinds) + f"{'PyTorch':>18}")
    for row in result["speed"]:
        cells = []
        for kind in kinds:
            ours = row["seconds"][kind]
            ratio = f" ({row['ratios'][kind]['both']:.2f})" if "ratios" in row else ""
            cells.append(f"{ours['forward'] * 1e6:.0f}/{ours['backward'] * 1e6:.0f}{ratio}".rjust(26))
        theirs = row["seconds"].get("torch")
        cells.append((f"{theirs['forward'] * 1e6:.0f}/{theirs['backward'] * 1e6:.0f}" if theirs else "-").rjust(18))
        lines.append(f"{'x'.join(map(str, row['shape'])):<18}{row['dtype'] + ' ' + row['layout']:<10}" + "".join(cells))
    if result["left_out"]:
        lines.append(f"left out for time: {', '.join(result['left_out'])}")
    lines.append(_verdict(result))
    return "\n".join(lines)


def _kinds(result: dict[str, Any]) -> list[str]:
    """The settings that were measured."""
    return [kind for kind in OURS if all(kind in row["seconds"] for row in result["speed"])]


def _verdict(result: dict[str, Any]) -> str:
    """Whether it is right, and how its time compares, in one line."""
    wrong = sum(not row["good"] for row in result["correctness"])
    said = [f"{wrong} of {len(result['correctness'])} results WRONG" if wrong else "all results right"]
    rows = [row for row in result["speed"] if "ratios" in row]
    for kind in _kinds(result) if rows else ():
        ratios = [row["ratios"][kind]["both"] for row in rows]
        slower = sum(ratio > 1 for ratio in ratios)
        mean = statistics.geometric_mean(ratios)
        said.append(f"{kind} {mean:.2f}, highest {max(ratios):.2f}, {slower} of {len(rows)} rows above 1")
    if not rows:
        said.append("no row has PyTorch's time" if result["device"] != "CPU" else "PyTorch has none on the CPU")
    return f"time over PyTorch's (geometric mean): {'; '.join(said[1:])}; {said[0]}"


def rows_of(shapes: Sequence[Any], kinds: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Every shape with every kind, in an order in which each of both comes early."""
    return [(shape, kinds[(i + turn) % len(kinds)]) for turn in range(len(kinds)) for i, shape in enumerate(shapes)]


def _work(options: argparse.Namespace) -> int:
    rank = _Rank(options.backend, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    shapes = SHAPES if rank.gpu else SMALL_SHAPES
    start = time.monotonic()
    kinds = [(d, y) for d in (("f32", "f16", "bf16") if rank.gpu else ("f32", "bf16")) for y in ("nchw", "nhwc")]
    correctness = [row for dtype, layout in kinds for row in verify(rank, dtype, layout, options.settings)]
    speed, left_out = [], []
    for shape, (dtype, layout) in rows_of(shapes, kinds):
        # One rank's clock decides, so that all ranks measure the same cases.
        late = rank.torch.tensor([time.monotonic() - start], device=rank.device)
        rank.group.broadcast(late, 0)
        if late.item() > options.seconds:
            left_out.append(f"{'x'.join(map(str, shape))} {dtype} {layout}")
        else:
            speed.append(measure(rank, shape, dtype, layout, options.repeats, options.calls, options.settings))
    speed.sort(key=lambda row: (shapes.index(tuple(row["shape"])), kinds.index((row["dtype"], row["layout"]))))
    library = rank.handle.library
    good = all(row["good"] for row in correctness)
    if rank.rank == 0:
        result = {
            "ranks": rank.size,
            "device": rank.torch.cuda.get_device_name() if rank.gpu else "CPU",
            "library": f"{library.label} {'.'.join(map(str, library.version))}",
            "torch": rank.torch.__version__,
            "nccl": ".".join(map(str, rank.torch.cuda.nccl.version())) if rank.gpu else None,
            "pybnorm": pybnorm.__version__,
            "good": good,
            "correctness": correctness,
            "speed": speed,
            "left_out": left_out,
            "wall_seconds": time.monotonic() - start,
        }
        text = render(result)
        for name, content in (("sync-bench.json", json.dumps(result, indent=1)), ("sync-bench.txt", text)):
            with _files.replaced("--out", pathlib.Path(options.out, name), _KINDS[name]) as file:
                file.write(content.encode() + b"\n")
        print(text)
    rank.close()
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a result is not good or a process failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="folder for sync-bench.json and sync-bench.txt")
    parser.add_argument("--backend", default="cudnn", choices=pybnorm.backends())
    parser.add_argument("--ranks", type=int, default=2, help="processes to start; torchrun's own number under it")
    parser.add_argument("--settings", nargs="+", default=OURS, choices=OURS, help="ours to measure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20, help="calls per measurement")
    parser.add_argument("--seconds", type=float, default=120, help="start no further measurement after this time")
    options = parser.parse_args(arguments)
    pathlib.Path(options.out).mkdir(parents=True, exist_ok=True)
    try:
        for name, kind in _KINDS.items():
            _files.check("--out", pathlib.Path(options.out, name), kind)
    except ArgumentError as error:
        parser.error(str(error))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _work(options)
    given = sys.argv[1:] if arguments is None else list(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(options.ranks):
            environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": str(rank)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with open(f"{folder}/{rank}", "wb") as log:
                command = [sys.executable, "-m", "benchmarks.sync", *given]
                output = None if rank == 0 else log
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        codes = _wait(started, options.seconds + 2 * TIMEOUT_SECONDS)
        for rank, code in enumerate(codes):
            if code and rank:
                text = pathlib.Path(folder, str(rank)).read_text(errors="replace")
                print(f"rank {rank} ended with {code}:\n{text[-3000:]}", file=sys.stderr)
    return int(any(codes))


def _wait(started: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Exit codes. If a process fails or time is up, the others are ended: they would wait for it."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in started):
        if time.monotonic() > end or any(process.poll() for process in started):
            time.sleep(2)  # for the others' own messages
            for process in started:
                if process.poll() is None:
                    process.kill()
            break
        time.sleep(0.05)
    return [process.wait() for process in started]


if __name__ == "__main__":
    sys.exit(main())
