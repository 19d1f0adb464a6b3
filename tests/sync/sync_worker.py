"""One rank of the tests of `pybnorm.sync`: the communicators, the scenarios, and the process that runs them.

``python sync_worker.py KIND RANK SIZE FOLDER SCENARIO...`` runs scenarios one after the other on one communicator and
writes what each returned to FOLDER. A scenario must leave the ranks in step, also after errors: the next one shows it.
"""

import gc
import pathlib
import pickle
import sys
import threading
import time

import numpy as np

import pybnorm
from pybnorm import sync
from pybnorm.check.language.data import generate
from pybnorm.check.language.problem import Problem
from pybnorm.enums import Layout, Mode
from pybnorm.errors import PybnormError
from pybnorm.graph import BatchnormAttributes, BatchnormBackwardAttributes, Graph
from pybnorm.sync import SyncBatchNorm

TIMEOUT = 60  # seconds that a rank waits for the others, where the communicator knows how to

# Name: the problem without its operation, the parts of N for 4 ranks and for 2.
CASES = {
    "even": ("spatial,f32,nchw,8x5x4x3,fill=randn", (2, 2, 2, 2), (4, 4)),
    "uneven": ("spatial,f32,nchw,8x5x4x3,fill=randn,seed=1", (1, 4, 1, 2), (3, 5)),
    "empty": ("spatial,f32,nchw,8x19x4x3,fill=randn,seed=2", (3, 0, 5, 0), (0, 8)),
    "one rank has all": ("spatial,f32,nchw,4x3x5,fill=randn,seed=3", (0, 0, 4, 0), (4, 0)),
    "one element each": ("spatial,f32,nchw,4x33,fill=randn,seed=4", (1, 1, 1, 1), (1, 3)),
    "nhwc": ("spatial,f32,nhwc,8x16x4x3,fill=randn,seed=5", (2, 1, 4, 1), (3, 5)),
    "offset": ("spatial,f32,nchw,8x5x6x6,fill=randn,kappa=10000,seed=6", (2, 3, 1, 2), (3, 5)),
    "exact": ("spatial,f32,nchw,16x7x4x4", (4, 4, 4, 4), (8, 8)),
    "peract": ("peract,f32,nchw,8x5x4x3,fill=randn,seed=7", (2, 1, 4, 1), (3, 5)),
    "blend": ("spatial,f32,nchw,8x5x4x3,fill=randn,alpha=2,beta=-0.5,seed=8", (2, 3, 1, 2), (3, 5)),
    "wide": ("spatial,f32,nchw,64x1000,fill=randn,seed=9", (16, 20, 12, 16), (20, 44)),
    "bf16": ("spatial,bf16,nchw,8x5x4x3,fill=randn,seed=10", (2, 3, 1, 2), (3, 5)),
    "f16": ("spatial,f16,nchw,8x5x4x3,fill=randn,seed=11", (2, 3, 1, 2), (3, 5)),
    "f64": ("spatial,f64,nchw,8x5x4x3,fill=randn,seed=12", (2, 3, 1, 2), (3, 5)),
}


class AllReduced(SyncBatchNorm):
    """Backward as of more ranks than there are here."""

    _few = 1


ORDERS = {
    "any order": (SyncBatchNorm, False),
    "fixed order": (SyncBatchNorm, True),
    "all_reduce": (AllReduced, False),
}
REDUCED = ("even", "empty", "exact", "blend", "wide", "bf16", "f64")  # the cases of the last


def parts(name, size):
    """The parts of N."""
    return CASES[name][1] if size == 4 else CASES[name][2]


def bounds_of(name, size):
    return np.cumsum([0, *parts(name, size)])


class Threads:
    """A communicator between threads of one process: the members of `pybnorm.sync.Communicator`, nothing more."""

    devices = (1,)

    def __init__(self, shared, rank):
        self._shared, self.rank, self.size = shared, rank, shared["barrier"].parties
        self.vectors = 0
        self.collectives = []

    def vector(self, values, device_type, stream):
        self.vectors += 1
        return values.copy()

    def _exchange(self, send):
        slots, barrier = self._shared["slots"], self._shared["barrier"]
        slots[self.rank] = send
        barrier.wait(TIMEOUT)
        lengths = {s.size for s in slots}
        assert len(lengths) == 1, f"messages of different sizes {lengths}: a real communicator would hang or corrupt"
        rows = [s.copy() for s in slots]
        barrier.wait(TIMEOUT)
        return rows

    def all_gather(self, send, received, stream):
        self.collectives.append(("all_gather", send.size))
        received[:] = np.concatenate(self._exchange(send))

    def all_reduce(self, send, received, stream):
        self.collectives.append(("all_reduce", send.size))
        received[:] = sum(self._exchange(send))

    def read(self, vector, out, stream):
        out[:] = vector


class Context:
    """What a scenario gets: its communicator, a handle, and how arrays get to the handle's device and back."""

    def __init__(self, kind, communicator, rank, size):
        self.kind, self.communicator, self.rank, self.size = kind, communicator, rank, size
        self.gpu = kind in ("nccl", "cupy", "nccl4py")
        if self.gpu:
            import torch

            self.torch = torch
            self.stream = torch.cuda.Stream()
            self.handle = pybnorm.Handle("cudnn", stream=self.stream.cuda_stream)
        else:
            self.handle = pybnorm.Handle("onednn")

    def close(self):
        if self.gpu:
            self.torch.cuda.synchronize()
        self.handle.close()

    def put(self, array):
        if not self.gpu:
            return np.copy(array, order="K")
        if array.dtype.name == "bfloat16":
            result = self.torch.from_numpy(array.view(np.int16).copy(order="K")).view(self.torch.bfloat16).cuda()
        else:
            result = self.torch.from_numpy(np.copy(array, order="K")).cuda()
        self.torch.cuda.synchronize()
        return result

    def get(self, array):
        if not self.gpu:
            return array
        self.torch.cuda.synchronize()
        if array.dtype == self.torch.bfloat16:
            import ml_dtypes

            return array.cpu().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.cpu().numpy()

    def workspace(self, layer, call, *arguments, **options):
        """A workspace of the size that the layer asks for."""
        return self.memory(layer.workspace_size(call, *arguments, **options))

    def memory(self, nbytes):
        """Bytes aligned to 64; None for 0."""
        if self.gpu:
            return self.torch.full((nbytes,), 0xA5, dtype=self.torch.uint8, device="cuda") if nbytes else None
        memory = np.full(nbytes + 64, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]


# ---------------------------------------------------------------- scenarios that compute


def layer_of(context, name, order, **options):
    kind, deterministic = ORDERS[order]
    problem = Problem.parse("train," + CASES[name][0])
    per_activation = problem.mode == Mode.PER_ACTIVATION
    axis = tuple(range(1, len(problem.dims))) if per_activation else 1
    channels = problem.dims[1:] if per_activation else problem.dims[1]
    options |= {"axis": axis, "deterministic": deterministic}
    return kind(context.handle, context.communicator, channels, problem.dtype, **options)


def shard(context, name, problem, array):
    """This rank's part of an array, lying as the problem says."""
    bounds = bounds_of(name, context.size)
    part = array[bounds[context.rank] : bounds[context.rank + 1]]
    if problem.layout == Layout.CHANNELS_LAST:
        part = np.moveaxis(np.ascontiguousarray(np.moveaxis(part, 1, -1)), -1, 1)
    return context.put(part)


def compute(context, name, order, **options):
    """Forward and backward of one case, each on its own problem's data; with a workspace and without."""
    result = {}
    layer = layer_of(context, name, order, **options)
    problem = Problem.parse("train," + CASES[name][0])
    inputs = generate(problem)
    x, y = shard(context, name, problem, inputs.x), shard(context, name, problem, inputs.prior)
    scale, bias = context.put(inputs.scale), context.put(inputs.bias)
    running = {"running_mean": context.put(inputs.mean), "running_variance": context.put(inputs.variance)}
    saved = {n: context.put(np.full_like(inputs.scale, np.nan)) for n in ("saved_mean", "saved_inv_variance")}
    keywords = {"alpha": problem.alpha, "beta": problem.beta, "epsilon": problem.epsilon}
    keywords |= {"exponential_average_factor": problem.factor, **running, **saved}
    workspace = context.workspace(layer, "forward", x, scale, bias, y, **keywords)
    total = layer.forward(x, scale, bias, y, **keywords, workspace=workspace)
    result["forward"] = {"y": context.get(y), "total": total}
    result["forward"] |= {n: context.get(a) for n, a in (running | saved).items()}

    problem = Problem.parse("backward," + CASES[name][0])
    inputs = generate(problem)
    x, dy = shard(context, name, problem, inputs.x), shard(context, name, problem, inputs.dy)
    dx = shard(context, name, problem, inputs.prior)
    scale = context.put(inputs.scale)
    dscale, dbias = context.put(np.full_like(inputs.scale, np.nan)), context.put(np.full_like(inputs.scale, np.nan))
    keywords = {"alpha": problem.alpha, "beta": problem.beta}
    keywords |= {n: context.put(getattr(inputs, n)) for n in ("saved_mean", "saved_inv_variance")}
    workspace = context.workspace(layer, "backward", x, dy, scale, dx, dscale, dbias, **keywords)
    total = layer.backward(x, dy, scale, dx, dscale, dbias, **keywords, workspace=workspace)
    result["backward"] = {"dx": context.get(dx), "total": total, "nbytes": layer.nbytes}
    result["backward"] |= {"dscale": context.get(dscale), "dbias": context.get(dbias)}
    return result


def statistics_only(context):
    """Without running and saved statistics, scale and bias; then counts that change from call to call."""
    layer = SyncBatchNorm(context.handle, context.communicator, 3)
    outputs = []
    for step in range(3):
        rng = np.random.default_rng(step)
        rows = [(r + step) % (context.size + 1) for r in range(context.size)]
        whole = rng.normal(5, 2, (sum(rows), 3, 4)).astype(np.float32)
        start = sum(rows[: context.rank])
        x = context.put(whole[start : start + rows[context.rank]])
        y = context.put(np.full_like(whole[start : start + rows[context.rank]], np.nan))
        total = layer.forward(x, None, None, y, workspace=context.workspace(layer, "forward", x, None, None, y))
        outputs.append((whole, start, rows[context.rank], context.get(y), total))
    return outputs


def promised(context):
    """Counts given once."""
    outputs = {}
    for name in ("even", "empty"):
        problem = Problem.parse("train," + CASES[name][0])
        per_row = problem.m // problem.dims[0]
        counts = [n * per_row for n in parts(name, context.size)]
        outputs[name] = compute(context, name, "fixed order", counts=counts)
    return outputs


GRAPHS = ("uneven", "nhwc", "offset", "bf16")


def graphs(context, name):
    """The same by graphs with peer_stats that were JSON before."""
    result = {}
    for call in ("train", "backward"):
        problem = Problem.parse(f"{call}," + CASES[name][0])
        inputs = generate(problem)
        data = {n: shard(context, name, problem, getattr(inputs, n)) for n in ("x", "prior")}
        data["dy"] = shard(context, name, problem, inputs.dy) if call == "backward" else None
        arrays = {1: data["x"], 2: context.put(inputs.scale)}
        made, given = Graph().set_name(name).set_io_data_type(problem.dtype), {}
        made.set_intermediate_data_type("float").set_compute_data_type("float")
        vector = (1, problem.dims[1], *[1] * (len(problem.dims) - 2))
        strides = [s // data["x"].dtype.itemsize for s in data["x"].strides] if not context.gpu else data["x"].stride()
        for uid, role in enumerate(("x", "scale", "bias", "mean", "variance", "dy"), 1):
            of = {"dim": data["x"].shape, "stride": strides} if role in ("x", "dy") else {"dim": vector}
            given[role] = made.tensor(name=role, uid=uid, data_type=problem.dtype if "stride" in of else "float", **of)
        peers = [made.tensor(name="peer", dim=(2, 4), stride=(4, 1), data_type="float", uid=50)]
        if call == "train":
            attributes = BatchnormAttributes().set_epsilon(problem.epsilon).set_peer_stats(peers)
            attributes.set_previous_running_stats(given["mean"], given["variance"], problem.factor)
            outputs = made.batchnorm(given["x"], given["scale"], given["bias"], attributes)
            arrays |= {3: context.put(inputs.bias), 4: context.put(inputs.mean), 5: context.put(inputs.variance)}
            names = ("y", "saved_mean", "saved_inv_variance", "running_mean", "running_variance")
        else:
            attributes = BatchnormBackwardAttributes().set_peer_stats(peers)
            attributes.set_saved_mean_and_inv_variance(given["mean"], given["variance"])
            outputs = made.batchnorm_backward(given["dy"], given["x"], given["scale"], attributes)
            arrays |= {6: data["dy"], 4: context.put(inputs.saved_mean), 5: context.put(inputs.saved_inv_variance)}
            names = ("dx", "dscale", "dbias")
        for uid, tensor in enumerate(outputs, 10):
            tensor.set_uid(uid).set_output(True)
            arrays[uid] = data["prior"] if uid == 10 else context.put(np.full_like(inputs.scale, np.nan))
        restored = Graph()
        restored.from_json(made.to_json())
        restored.set_communicator(context.communicator).build(context.handle)
        workspace = context.memory(restored.get_workspace_size())
        with pybnorm.Handle(context.handle.backend) as other:
            refused = attempt(restored.execute, other, arrays, workspace)
        restored.execute(context.handle, {**arrays, 50: 12345}, workspace)
        result[call] = {n: context.get(arrays[uid]) for uid, n in enumerate(names, 10)}
        result[call] |= {"alone": attempt(made.validate), "refused": refused}
        result[call]["plan"] = restored.get_plan_name()
    return result


# ---------------------------------------------------------------- scenarios that fail


def attempt(function, *arguments, **options):
    """(class, text, ranks) of the error, or None."""
    try:
        function(*arguments, **options)
    except PybnormError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    return None


def disagreements(context):
    """Constructors whose arguments differ on rank 1."""
    odd = context.rank == 1

    def make(handle=None, channels=4, dtype="f32", **options):
        return attempt(SyncBatchNorm, handle or context.handle, context.communicator, channels, dtype, **options)

    size = context.size
    result = {
        "channels": make(channels=5 if odd else 4),
        "many channels": make(channels=10**4 + 1 if odd else 10**4),
        "order of sizes": make(channels=(4, 6) if odd else (6, 4), axis=(1, 2)),
        "dtype": make(dtype="bf16" if odd else "f32"),
        "deterministic": make(deterministic=odd),
        "counts": make(counts=[7 + odd] * size),
        "counts on one": make(counts=[7] * size if odd else None),
        "bad channels": make(channels=-3 if odd else 4),
        "bad handle": make(handle="onednn" if odd else None),
        "bad dtype": make(dtype="int8" if odd else "f32"),
        "bad counts": make(counts=[7] * (size + 1) if odd else [7] * size),
        "bad axis": make(axis=(1, 1) if odd else 1),
        "all the same": make(),
    }
    # A machine with two backends for one kind of memory is rare: rank 1 says that its handle is another one's.
    if context.kind != "threads":  # threads share the module
        names = sync.backends
        try:
            if odd:
                sync.backends = lambda: (*names()[1:], names()[0])
            result["backend"] = make()
        finally:
            sync.backends = names
    return result


def failing_calls(context):
    """Calls that fail on one rank; each is followed by one that must work."""
    return {
        (name, order, *rest): outcome
        for order in ORDERS
        for (name, *rest), outcome in _failing_calls(context, order).items()
    }


def _failing_calls(context, order):
    bad = context.rank == context.size - 1
    kind, deterministic = ORDERS[order]
    layer = kind(context.handle, context.communicator, 3, deterministic=deterministic)
    data = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)

    def forward(x=data, y=data, workspace=None, **options):
        given = [context.put(x), None, None, context.put(y)]
        if workspace is None:
            workspace = attempt_workspace(context, layer, "forward", *given, **options)
        return attempt(layer.forward, *given, workspace=workspace, **options)

    def backward(x=data, dx=data, **options):
        mean, inv = context.put(np.zeros(3, np.float32)), context.put(np.ones(3, np.float32))
        given = [context.put(x), context.put(data), None, context.put(dx)]
        options = {"saved_mean": mean, "saved_inv_variance": inv} | options
        workspace = attempt_workspace(context, layer, "backward", *given, **options)
        return attempt(layer.backward, *given, workspace=workspace, **options)

    def in_place():
        x = context.put(data)
        y = x[:, :, 1:] if bad else context.put(data[:, :, :3])
        workspace = context.memory(1 << 16)
        return attempt(layer.forward, x[:, :, :3], None, None, y, workspace=workspace)

    wide, narrow = np.zeros((2, 4, 4), np.float32), data.astype(np.float16)
    one = context.put(np.zeros(3, np.float32))
    small = context.memory(64)
    calls = {
        "channels of x": lambda: forward(x=wide if bad else data),
        "dtype of x": lambda: forward(x=narrow if bad else data),
        "shape of y": lambda: forward(y=data[:1] if bad else data),
        "y over x": in_place,
        "epsilon": lambda: forward(epsilon=-1.0 if bad else 1e-5),
        "half a pair": lambda: forward(running_mean=one if bad else None),
        "workspace": lambda: forward(workspace=small if bad else None),
        "shape of dx": lambda: backward(dx=data[:1] if bad else data),
        "no saved mean": lambda: backward(**({"saved_mean": None} if bad else {})),
        "channels of backward's x": lambda: backward(x=wide if bad else data),
    }
    if order != "all_reduce":
        calls["another call"] = lambda: backward() if bad else forward()
    result = {}
    for name, call in calls.items():
        result[name,] = call()
        result[name, "next"] = forward(), backward()
    return result


def attempt_workspace(context, layer, call, *arguments, **options):
    """A workspace, or one that is large enough for any call where the size cannot be asked for."""
    try:
        return context.workspace(layer, call, *arguments, **options)
    except PybnormError:
        return context.memory(1 << 16)


def nothing_anywhere(context):
    """No rank has an element; then all of them together have one, and running statistics."""
    layer = SyncBatchNorm(context.handle, context.communicator, 3, deterministic=True)
    none, some = np.zeros((0, 3, 4), np.float32), np.zeros((1, 3, 1), np.float32)
    mean, inv = context.put(np.zeros(3, np.float32)), context.put(np.ones(3, np.float32))
    given = [context.put(none), None, None, context.put(none)]
    result = {"forward": attempt(layer.forward, *given, workspace=context.workspace(layer, "forward", *given))}
    options = {"saved_mean": mean, "saved_inv_variance": inv}
    given = [context.put(none), context.put(none), None, context.put(none)]
    workspace = context.workspace(layer, "backward", *given, **options)
    result["backward"] = attempt(layer.backward, *given, **options, workspace=workspace)
    x = some if context.rank == 0 else none[:, :, :1]
    given = [context.put(x), None, None, context.put(x)]
    for name, options in (
        ("running", {"running_mean": mean, "running_variance": inv}),
        ("no running", {}),
    ):
        workspace = context.workspace(layer, "forward", *given, **options)
        result[name] = attempt(layer.forward, *given, **options, workspace=workspace)
    return result


def broken_promise(context):
    """counts that rank 0 does not keep."""
    layer = SyncBatchNorm(context.handle, context.communicator, 3, counts=[8] * context.size)
    rows = 3 if context.rank == 0 else 2
    x = np.ones((rows, 3, 4), np.float32)
    given = [context.put(x), None, None, context.put(x)]
    workspace = attempt_workspace(context, layer, "forward", *given)
    first = attempt(layer.forward, *given, workspace=workspace)
    y = context.get(given[3])
    checked = attempt(layer.check)
    x = np.ones((2, 3, 4), np.float32)
    given = [context.put(x), None, None, context.put(x)]
    workspace = attempt_workspace(context, layer, "forward", *given)
    return first, y, checked, attempt(layer.forward, *given, workspace=workspace), attempt(layer.check)


def alone(context):
    """A communicator of one rank, and things that are none."""
    result = {"no communicator": attempt(SyncBatchNorm, context.handle, object(), 3)}
    own = None
    if context.kind == "mpi4py":
        from mpi4py import MPI

        own = MPI.COMM_SELF
        result["null"] = attempt(SyncBatchNorm, context.handle, MPI.COMM_NULL, 3)
    elif context.kind in ("gloo", "nccl"):
        import torch.distributed as dist

        groups = [dist.new_group([rank]) for rank in range(context.size)]  # collective: every rank makes all of them
        own = groups[context.rank]
    elif context.kind == "threads":
        own = Threads({"slots": [None], "barrier": threading.Barrier(1)}, 0)
    if own is not None:
        result["one rank"] = attempt(SyncBatchNorm, context.handle, own, 3)
    return result


SCENARIOS = {
    "statistics only": statistics_only,
    "promised": promised,
    "disagreements": disagreements,
    "failing calls": failing_calls,
    "nothing anywhere": nothing_anywhere,
    "broken promise": broken_promise,
    "alone": alone,
}
COMPUTED = [(n, o) for n in CASES for o in ORDERS if o != "all_reduce" or n in REDUCED]
for _name, _order in COMPUTED:
    SCENARIOS[f"{_name}, {_order}"] = lambda context, name=_name, order=_order: compute(context, name, order)


for _name in GRAPHS:
    SCENARIOS[f"graph, {_name}"] = lambda context, name=_name: graphs(context, name)


def run(context, names, report):
    """Scenarios in order; an unexpected error is the last result, because the ranks are no longer in step."""
    try:
        for name in names:
            report(f"{name} ...")
            yield name, SCENARIOS[name](context)
    finally:
        context.close()


# ---------------------------------------------------------------- processes


def connect(kind, rank, size, folder):
    if kind == "mpi4py":
        from mpi4py import MPI

        return MPI.COMM_WORLD
    import datetime

    import torch
    import torch.distributed as dist

    if kind in ("gloo", "nccl"):
        if kind == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            kind,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=TIMEOUT),
        )
        return dist.group.WORLD
    torch.cuda.set_device(rank)
    if kind == "cupy":
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(rank).use()
        unique = share(folder, rank, nccl.get_unique_id)
        return nccl.NcclCommunicator(size, unique, rank)
    import cuda.core
    import nccl.core

    cuda.core.Device(rank).set_current()
    return nccl.core.Communicator.init(size, rank, share(folder, rank, nccl.core.get_unique_id))


def share(folder, rank, make):
    """What rank 0 made, through a file."""
    path = folder / "unique"
    if rank == 0:
        path.with_suffix(".part").write_bytes(pickle.dumps(make()))
        path.with_suffix(".part").rename(path)
    end = time.monotonic() + TIMEOUT
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError("rank 0 has not shared the communicator's id")
        time.sleep(0.01)
    return pickle.loads(path.read_bytes())


def main():
    kind, rank, size, folder, *names = sys.argv[1:]
    folder = pathlib.Path(folder)
    communicator = connect(kind, int(rank), int(size), folder)
    if kind == "mpi4py":
        rank = communicator.Get_rank()
        assert communicator.Get_size() == int(size), f"mpiexec started {communicator.Get_size()} ranks"
    context = Context(kind, communicator, int(rank), int(size))
    results = {}
    for name, result in run(context, names, lambda line: print(f"rank {rank}: {line}", flush=True)):
        results[name] = result
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(results))
    if kind in ("gloo", "nccl"):
        import torch.distributed as dist

        # A group that something still refers to keeps its threads, and a process that ends with them aborts.
        del context, communicator
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
