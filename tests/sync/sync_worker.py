"""One rank of the tests of `pybnorm.sync`: the communicators, the scenarios, and the process that runs them.

``python sync_worker.py KIND RANK SIZE FOLDER`` runs the scenarios one after the other on one communicator and
writes what each returned, and what it found wrong, to FOLDER. A scenario must leave the ranks in step, also after
errors: the next one shows it.
"""

import functools
import gc
import pathlib
import pickle
import sys
import threading
import types

import numpy as np

import pybnorm
from pybnorm import reference, sync
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


def case_of(call, name):
    """The problem of a call, and its data."""
    problem = Problem.parse(f"{call},{CASES[name][0]}")
    return problem, generate(problem)


def parts(name, size):
    """The parts of N."""
    return CASES[name][1] if size == 4 else CASES[name][2]


def rows_of(name, size, rank):
    """A rank's rows."""
    bounds = np.cumsum([0, *parts(name, size)])
    return slice(bounds[rank], bounds[rank + 1])


class Threads:
    """A communicator between threads of one process: the members of `pybnorm.sync.Communicator`, nothing more."""

    devices = (1,)

    def __init__(self, shared, rank):
        self._shared, self.rank, self.size = shared, rank, shared["barrier"].parties
        self.vectors = 0
        self.collectives = []

    def vector(self, values, device_type, stream):
        """Aligned, as allocators of devices do."""
        self.vectors += 1
        memory = np.empty(values.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        vector = memory[start : start + values.nbytes].view(values.dtype)
        vector[:] = values
        return vector

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
        self.wrong, self.scenario = [], ""
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

    def memory(self, nbytes=1 << 20):
        """Bytes aligned to 64; None for 0."""
        if self.gpu:
            return self.torch.full((nbytes,), 0xA5, dtype=self.torch.uint8, device="cuda") if nbytes else None
        memory = np.full(nbytes + 64, 0xA5, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]

    def hold(self, good, text):
        """Note what is wrong: an error would have the other ranks wait."""
        if not good:
            self.wrong.append(f"{self.scenario}: {text}")

    def expect(self, label, outcome, errors=None, *texts, ranks=None):
        """Note an outcome of `attempt` that is none of these errors, with a first text, others and ranks."""
        name, text, concerned = outcome or (None, "", None)
        good = name in errors if errors else name is None
        good = good and text.startswith(texts[:1] or "") and all(part in text for part in texts[1:])
        self.hold(good and ranks in (None, concerned), f"{label}: {outcome}")

    def expect_of_others(self, label, outcome, verb, culprit):
        """What ranks hear of a mistake on another one."""
        texts = f"rank {self.rank}: ", f"{verb} on rank {culprit}"
        self.expect(label, outcome, ("RankError",), *texts, ranks=(culprit,))


def attempt(function, *arguments, **options):
    """(class, text, ranks) of the error, or None."""
    try:
        function(*arguments, **options)
    except PybnormError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    return None


# ---------------------------------------------------------------- scenarios that compute


def shard(context, name, problem, array):
    """This rank's part of an array, lying as the problem says."""
    part = array[rows_of(name, context.size, context.rank)]
    if problem.layout == Layout.CHANNELS_LAST:
        part = np.moveaxis(np.ascontiguousarray(np.moveaxis(part, 1, -1)), -1, 1)
    return context.put(part)


def compute(context, name, order, **options):
    """Forward and backward of one case, each on its own problem's data."""
    kind, deterministic = ORDERS[order]
    problem, _ = case_of("train", name)
    per_activation = problem.mode == Mode.PER_ACTIVATION
    axis = tuple(range(1, len(problem.dims))) if per_activation else 1
    channels = problem.dims[1:] if per_activation else problem.dims[1]
    options |= {"axis": axis, "deterministic": deterministic}
    layer, result = kind(context.handle, context.communicator, channels, problem.dtype, **options), {}
    for call, method in (("train", layer.forward), ("backward", layer.backward)):
        problem, inputs = case_of(call, name)
        x, out = shard(context, name, problem, inputs.x), shard(context, name, problem, inputs.prior)
        scale, empty = context.put(inputs.scale), np.full_like(inputs.scale, np.nan)
        keywords = {"alpha": problem.alpha, "beta": problem.beta}
        if call == "train":
            given = x, scale, context.put(inputs.bias), out
            outputs = {"running_mean": context.put(inputs.mean), "running_variance": context.put(inputs.variance)}
            outputs |= {n: context.put(empty) for n in ("saved_mean", "saved_inv_variance")}
            keywords |= {"epsilon": problem.epsilon, "exponential_average_factor": problem.factor, **outputs}
            outputs = {"y": out} | outputs
        else:
            outputs = {"dx": out, "dscale": context.put(empty), "dbias": context.put(empty)}
            given = x, shard(context, name, problem, inputs.dy), scale, *outputs.values()
            keywords |= {n: context.put(getattr(inputs, n)) for n in ("saved_mean", "saved_inv_variance")}
        workspace = context.memory(layer.workspace_size(method.__name__, *given, **keywords))
        total = method(*given, **keywords, workspace=workspace)
        context.hold(total == problem.m, f"{call}: a total of {total}")
        result[call] = {n: context.get(a) for n, a in outputs.items()}
    return result


def statistics_only(context):
    """Without running and saved statistics, scale and bias; and counts that change from call to call."""
    layer = SyncBatchNorm(context.handle, context.communicator, 3)
    for step in range(3):
        rows = [(r + step) % (context.size + 1) for r in range(context.size)]
        whole = np.random.default_rng(step).normal(5, 2, (sum(rows), 3, 4)).astype(np.float32)
        mine = slice(sum(rows[: context.rank]), sum(rows[: context.rank + 1]))
        x, y = context.put(whole[mine]), context.put(np.full_like(whole[mine], np.nan))
        workspace = context.memory(layer.workspace_size("forward", x, None, None, y))
        total = layer.forward(x, None, None, y, workspace=workspace)
        right = reference.forward_training(whole, np.ones((1, 3, 1)), np.zeros((1, 3, 1))).y[mine]
        good = total == 4 * sum(rows) and np.abs(context.get(y) - right).max(initial=0) < 5e-6
        context.hold(good, f"step {step}")


def again(context):
    """Cases in fixed order once more; of the first two counts are promised."""
    result = {}
    for name in ("even", "empty", "uneven", "bf16"):
        problem, _ = case_of("train", name)
        counts = [n * problem.m // problem.dims[0] for n in parts(name, context.size)]
        counts = counts if name in ("even", "empty") else None
        result[name] = compute(context, name, "fixed order", counts=counts)
    return result


GRAPHS = ("uneven", "nhwc", "offset", "bf16")


def graphs(context, name):
    """The same by graphs with peer_stats that were JSON before."""
    result = {}
    for call in ("train", "backward"):
        problem, inputs = case_of(call, name)
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
        context.expect("another handle", refused, ("ArgumentError",), "handle: ", "peer_stats")
        texts = "", "peer_stats", "set_communicator"
        context.expect("no communicator", attempt(made.validate), ("ArgumentError",), *texts)
        plan = restored.get_plan_name()
        context.hold(plan.endswith("forward" if call == "train" else "backward"), plan)
        restored.execute(context.handle, {**arrays, 50: 12345}, workspace)
        result[call] = {n: context.get(arrays[uid]) for uid, n in enumerate(names, 10)}
    return result


# ---------------------------------------------------------------- scenarios of mistakes


def disagreements(context):
    """Constructors whose arguments differ on rank 1, or are bad there."""
    odd, size = context.rank == 1, context.size

    def make(handle=None, channels=4, **options):
        options = {"axis": (1, 2)} | options if isinstance(channels, tuple) else options
        return attempt(SyncBatchNorm, handle or context.handle, context.communicator, channels, **options)

    for argument, usual, other, shown in (
        ("channels", 4, 5, "rank 0: 4, rank 1: 5"),
        ("channels", 10**4, 10**4 + 1, "rank 0: 10000, rank 1: 10001"),
        ("channels", (6, 4), (4, 6), "rank 0: (6, 4), rank 1: (4, 6)"),
        ("dtype", "f32", "bf16", "rank 0: f32, rank 1: bf16"),
        ("deterministic", False, True, "rank 0: False, rank 1: True"),
        ("counts", [7] * size, [8] * size, "rank 0: #"),
        ("counts", None, [7] * size, "rank 0: None, rank 1: #"),
    ):
        outcome = make(**{argument: other if odd else usual})
        context.expect(argument, outcome, ("ArgumentError",), f"{argument}: got ", shown)
    if context.kind != "threads":  # which share the module
        # A machine with two backends for one kind of memory is rare: rank 1 says that its handle is another one's.
        names = sync.backends
        sync.backends = (lambda: (*names()[1:], names()[0])) if odd else names
        context.expect("backend", make(), ("ArgumentError",), "handle: got ", "rank 0: ")
        sync.backends = names
    for argument, value, error in (
        ("channels", -3, "ArgumentError"),
        ("handle", "onednn", "ArgumentTypeError"),
        ("dtype", "int8", "ArgumentTypeError"),
        ("counts", [7] * (size + 1), "ArgumentError"),
        ("axis", (1, 1), "ArgumentError"),
    ):
        outcome = make(**({argument: value} if odd else {}))
        if odd:
            context.expect(f"bad {argument}", outcome, (error,), f"{argument}: got ")
        else:
            context.expect_of_others(f"bad {argument}", outcome, "refused", 1)
    if context.kind == "threads":
        context.communicator.devices = (2,) if odd else (1,)
        outcome, context.communicator.devices = make(), (1,)
        if odd:
            start = "communicator: got one for memory of DLPack device type 2, allowed: one for memory of type 1"
            context.expect("devices", outcome, ("ArgumentError",), start)
        else:
            context.expect_of_others("devices", outcome, "refused", 1)
    context.expect("all the same", make())


def failing_calls(context, order):
    """Calls that fail on the last rank; each is followed by some that must work."""
    culprit = context.size - 1
    bad, put = context.rank == culprit, context.put
    kind, deterministic = ORDERS[order]
    layer = kind(context.handle, context.communicator, 3, deterministic=deterministic)
    data = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    usual = {
        "forward": {"x": data, "scale": None, "bias": None, "y": data},
        "backward": {
            "x": data, "dy": data, "scale": None, "dx": data, "saved_mean": zeros, "saved_inv_variance": ones,
        },
    }  # fmt: skip

    def call(name, **changed):
        given = {n: None if array is None else put(array) for n, array in usual[name].items()}
        return attempt(getattr(layer, name), **{**given, "workspace": context.memory(), **(changed if bad else {})})

    def succeed(label):
        context.expect(f"after {label}", call("forward"))
        context.expect(f"after {label}", call("backward"))

    whole, wide = put(data), put(np.zeros((2, 4, 4), np.float32))
    for name, changed, start in (
        ("forward", {"x": wide}, "x: got dims (2, 4, 4)"),
        ("forward", {"x": put(data.astype(np.float16))}, "x: got dtype f16"),
        ("forward", {"y": put(data[:1])}, "y: got dims (1, 3, 4)"),
        ("forward", {"x": whole[:, :, :3], "y": whole[:, :, 1:]}, "y: got "),
        ("forward", {"epsilon": -1.0}, "epsilon: got -1.0"),
        ("forward", {"running_mean": put(zeros)}, "running_variance: got None"),
        ("forward", {"workspace": context.memory(64)}, "workspace: got 64 bytes"),
        ("backward", {"dx": put(data[:1])}, "dx: got dims (1, 3, 4)"),
        ("backward", {"saved_mean": None}, "saved_mean: got None"),
        ("backward", {"x": wide}, "x: got dims (2, 4, 4)"),
    ):
        outcome = call(name, **changed)
        if bad:
            context.expect(start, outcome, ("ArgumentError", "ArgumentTypeError", "WorkspaceError"), start)
        else:
            context.expect_of_others(start, outcome, "failed", culprit)
        succeed(start)
    if order != "all_reduce":  # where both calls gather they notice each other
        name = "backward" if bad else "forward"
        others = tuple(r for r in range(context.size) if (r == culprit) != bad)
        text = f"rank {context.rank} called {name}"
        context.expect("another call", call(name), ("RankError",), text, ranks=others)
        succeed("another call")


def nothing_anywhere(context):
    """No rank has an element; then all of them together have one, and running statistics."""
    layer = SyncBatchNorm(context.handle, context.communicator, 3, deterministic=True)
    none, some = np.zeros((0, 3, 4), np.float32), np.zeros((1, 3, 1), np.float32)
    mean, inv = context.put(np.zeros(3, np.float32)), context.put(np.ones(3, np.float32))
    given = [context.put(none), None, None, context.put(none)]
    context.expect("workspace", attempt(layer.workspace_size, "inference", *given), ("ArgumentError",), "call: got inf")
    context.expect("before any call", attempt(layer.check))
    nothing = ("ArgumentError",), "x: got no elements on any rank"
    context.expect("forward", attempt(layer.forward, *given, workspace=context.memory()), *nothing)
    options = {"saved_mean": mean, "saved_inv_variance": inv, "workspace": context.memory()}
    given = [context.put(none), context.put(none), None, context.put(none)]
    context.expect("backward", attempt(layer.backward, *given, **options), *nothing)
    x = some if context.rank == 0 else none[:, :, :1]
    given = [context.put(x), None, None, context.put(x)]
    running = {"running_mean": mean, "running_variance": inv}
    outcome = attempt(layer.forward, *given, workspace=context.memory(), **running)
    context.expect("running", outcome, ("ArgumentError",), "x: got 1 element on all ranks")
    context.expect("no running", attempt(layer.forward, *given, workspace=context.memory()))
    given = [context.put(np.ones((2, 3, 4), np.float32)), None, None, context.put(np.ones((2, 3, 4), np.float32))]
    context.expect("more", attempt(layer.forward, *given, workspace=context.memory(), **running))


def broken_promise(context):
    """counts that rank 0 does not keep."""
    layer = SyncBatchNorm(context.handle, context.communicator, 3, counts=[8] * context.size)

    def call(rows):
        x = np.ones((rows, 3, 4), np.float32)
        given = [context.put(x), None, None, context.put(x)]
        return attempt(layer.forward, *given, workspace=context.memory()), given[3]

    outcome, y = call(3 if context.rank == 0 else 2)
    if context.rank == 0:
        start = "x: got 12 elements per statistic, allowed: 8, as counts promised"
        context.expect("on rank 0", outcome, ("ArgumentError",), start)
    elif context.gpu:  # nobody waits, so the call itself cannot know
        context.expect("on the others", outcome)
        context.hold(np.isnan(context.get(y)).all(), "y is a number")
    else:
        context.expect_of_others("on the others", outcome, "failed", 0)
    context.expect("check", attempt(layer.check), ("RankError",), ranks=(0,))
    context.expect("the next call", call(2)[0])
    context.expect("check of it", attempt(layer.check))


def alone(context):
    """A communicator of one rank, and things that are none."""
    almost = types.SimpleNamespace(rank=0, size=2, devices=(1,), all_gather=print)
    bad, own = [(object(), "ArgumentTypeError", ""), (almost, "ArgumentTypeError", "")], None
    if context.kind == "mpi4py":
        from mpi4py import MPI

        own = MPI.COMM_SELF
        bad.append((MPI.COMM_NULL, "ArgumentError", ""))
    elif context.kind in ("gloo", "nccl"):
        import torch.distributed as dist

        groups = [dist.new_group([rank]) for rank in range(context.size)]  # collective: every rank makes all of them
        own = groups[context.rank]
    elif context.kind == "threads":
        own = Threads({"slots": [None], "barrier": threading.Barrier(1)}, 0)
    if own is not None:
        bad.append((own, "ArgumentError", "2 ranks or more"))
    for given, error, text in bad:
        outcome = attempt(SyncBatchNorm, context.handle, given, 3)
        context.expect(given, outcome, (error,), "communicator: got ", text)


COMPUTED = [(n, o) for n in CASES for o in ORDERS if o != "all_reduce" or n in REDUCED]
SCENARIOS = {f"{n}, {o}": functools.partial(compute, name=n, order=o) for n, o in COMPUTED}
SCENARIOS |= {f"graph, {n}": functools.partial(graphs, name=n) for n in GRAPHS}
SCENARIOS |= {f"failing calls, {o}": functools.partial(failing_calls, order=o) for o in ORDERS}
SCENARIOS |= {
    "statistics only": statistics_only,
    "again": again,
    "disagreements": disagreements,
    "nothing anywhere": nothing_anywhere,
    "broken promise": broken_promise,
    "alone": alone,
}


def run(context, report=lambda line: None):
    """The result of each scenario; an unexpected error is the last one, because the ranks are no longer in step."""
    try:
        found = {}
        for name, scenario in SCENARIOS.items():
            if context.gpu or not name.startswith("f64"):  # oneDNN has none
                report(f"{name} ...")
                context.scenario = name
                found[name] = scenario(context)
        return found | {"wrong": context.wrong}
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
        place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": size}
        dist.init_process_group(kind, **place, timeout=datetime.timedelta(seconds=TIMEOUT))
        return dist.group.WORLD
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", size)

    def share(make):
        """What rank 0 makes."""
        if rank == 0:
            store.set("id", pickle.dumps(make()))
        return pickle.loads(store.get("id"))

    if kind == "cupy":
        import cupy
        from cupy.cuda import nccl

        cupy.cuda.Device(rank).use()
        return nccl.NcclCommunicator(size, share(nccl.get_unique_id), rank)
    import cuda.core
    import nccl.core

    cuda.core.Device(rank).set_current()
    return nccl.core.Communicator.init(size, rank, share(nccl.core.get_unique_id))


def main():
    kind, rank, size, folder = sys.argv[1:]
    folder = pathlib.Path(folder)
    communicator = connect(kind, int(rank), int(size), folder)
    if kind == "mpi4py":
        rank = communicator.Get_rank()
        assert communicator.Get_size() == int(size), f"mpiexec started {communicator.Get_size()} ranks"
    context = Context(kind, communicator, int(rank), int(size))
    results = run(context, lambda line: print(f"rank {rank}: {line}", flush=True))
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
