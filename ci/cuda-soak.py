"""Reliability on a CUDA device, with PyTorch for memory and streams; exits with 1 if something is not as it must be.

Many calls with flat memory, threads with a handle and a stream each, two streams, a captured graph.
    python3 ci/cuda-soak.py [CALLS]     default 1000000
"""

import resource
import sys
import threading

import torch

import pybnorm

SHAPE, CHANNELS = (4, 64, 8, 8), 64
failures = []


def say(text, good):
    print(("ok      " if good else "FAILED  ") + text, flush=True)
    if not good:
        failures.append(text)


def tensors(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(SHAPE, device="cuda", generator=generator).contiguous(memory_format=torch.channels_last)
    scale, bias = torch.ones(CHANNELS, device="cuda"), torch.zeros(CHANNELS, device="cuda")
    return x, torch.empty_like(x), scale, bias, [torch.ones(CHANNELS, device="cuda") for _ in range(4)]


def error(x, y):
    wide = x.double()
    variance, mean = torch.var_mean(wide, (0, 2, 3), correction=0, keepdim=True)
    return float((y.double() - (wide - mean) / (variance + 1e-5).sqrt()).abs().max())


def workspace():
    memory = torch.empty(1 << 22, dtype=torch.uint8, device="cuda")
    return memory, (memory.data_ptr(), memory.numel())


def used():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def many_calls(count):
    x, y, scale, bias, statistics = tensors()
    _, space = workspace()
    with pybnorm.Handle("cudnn", stream=torch.cuda.current_stream().cuda_stream) as handle:
        plans = [handle.plan_forward_training(x, y, algorithm=a) for a in ("ex", "graph", "spatial")]
        results = y, torch.empty_like(y)  # other pointers at every call: each needs a new variant pack

        def go(calls):
            for i in range(calls):
                plans[i % 3](x, scale, bias, results[i & 1], *statistics, space)

        go(10000)
        before = used()
        go(count)
        after = used()
    lost, grown = before[0] - after[0], after[1] - before[1]
    say(f"{count} calls of three plans: device memory less by {lost} bytes, host's peak more by {grown} KiB",
        lost <= 0 and grown <= 1024)  # fmt: skip
    say(f"and the last result is right, worst error {error(x, results[1]):.1e}", error(x, results[1]) < 1e-5)


def threads(count=8, calls=5000):
    worst = {}

    def work(seed):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), pybnorm.Handle("cudnn", stream=stream.cuda_stream) as handle:
            x, y, scale, bias, statistics = tensors(seed)
            _, space = workspace()
            plan = handle.plan_forward_training(x, y)
            for _ in range(calls):
                plan(x, scale, bias, y, *statistics, space)
            stream.synchronize()
            worst[seed] = error(x, y)

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    good = len(worst) == count and max(worst.values()) < 1e-5
    say(
        f"{len(worst)} threads with a handle and a stream each, {calls} calls: worst error {max(worst.values()):.1e}",
        good,
    )


def two_streams(rounds=500):
    x, _, scale, bias, statistics = tensors()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    outs = [torch.empty_like(x) for _ in streams]
    spaces = [workspace() for _ in streams]
    other = [torch.ones(CHANNELS, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    with pybnorm.Handle("cudnn") as handle:
        plan = handle.plan_forward_training(x, outs[0])
        for _ in range(rounds):
            for stream, y, (_, space), own in zip(streams, outs, spaces, (statistics, other), strict=True):
                handle.set_stream(stream)
                plan(x, scale, bias, y, *own, space)
        torch.cuda.synchronize()
    say(f"one handle and plan over two streams in turn, {rounds} rounds: equal", torch.equal(*outs))


def capture():
    x, y, scale, bias, statistics = tensors()
    _, space = workspace()
    with pybnorm.Handle("cudnn") as handle:
        for algorithm in ("spatial", "ex", "graph"):
            handle.set_stream(torch.cuda.current_stream())
            plan = handle.plan_forward_training(x, y, algorithm=algorithm)
            plan(x, scale, bias, y, *statistics, space)
            torch.cuda.synchronize()
            wanted = y.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                handle.set_stream(torch.cuda.current_stream())
                plan(x, scale, bias, y, *statistics, space)
            y.zero_()
            graph.replay()
            torch.cuda.synchronize()
            say(f"plan {algorithm} captured into a CUDA graph, replayed: equal", torch.equal(y, wanted))


version = ".".join(map(str, pybnorm.load("cudnn").version))
print(f"cuDNN {version}, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
many_calls(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
threads()
two_streams()
capture()
sys.exit(1 if failures else 0)
