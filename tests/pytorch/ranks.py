"""One of 2 or 3 ranks: ``python ranks.py RANK SIZE BACKEND FOLDER``, which prints what it finds wrong.

BACKEND is that of ``torch.distributed``: gloo on the CPU, or nccl with a GPU for each rank.

Every rank makes the whole batch from a seed, and computes its own rows of it, of all ranks and of the first two, by our
modules, and all rows by PyTorch's in float64. It does not end at what is wrong: the others would wait.
"""

import contextlib
import copy
import datetime
import functools
import sys
import warnings

warnings.filterwarnings("ignore")  # PyTorch without NumPy, and its own of processes

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from test_compositions import formula  # noqa: E402

import pybnorm.torch as ours  # noqa: E402
from pybnorm.torch import sync  # noqa: E402

CASES = {
    "first": {},
    "last": {"layout": torch.channels_last},
    "uneven, last": {"rows": (1, 4, 2), "layout": torch.channels_last},
    "an empty rank": {"rows": (3, 0, 4)},
    "average": {"options": {"momentum": None}},
    "bare": {"options": {"affine": False, "track_running_stats": False}},
    "bf16": {"dtype": torch.bfloat16, "layout": torch.channels_last},
    "one axis": {"space": ()},
    "volumes, far": {"space": (3, 2, 4), "offset": 1000.0},
    "one row each": {"rows": (1, 1, 1), "space": (2,)},
}


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(case, size):
    return CASES[case].get("rows", (3, 3, 3))[:size]


def batch(case, size, step):
    """x and dy of all ranks, in the dtype and layout of a case."""
    terms = CASES[case]
    shape = sum(rows_of(case, size)), 5, *terms.get("space", (6, 7))
    made = (randn(10 * step + 1, *shape) * 1.5 + 0.5 + terms.get("offset", 0.0), randn(10 * step + 2, *shape))
    layout = terms.get("layout", torch.contiguous_format)
    return tuple(t.to(terms.get("dtype", torch.float32)).contiguous(memory_format=layout) for t in made)


def module_of(kind, case):
    """A batch norm of a class of PyTorch's, with a state that is not the initial one."""
    module = kind(5, **CASES[case].get("options", {}))
    with torch.no_grad():
        for number, value in enumerate([*module.parameters(), *(b for b in module.buffers() if b.dim())]):
            value.copy_(randn(50 + number, 5).abs() + 0.25)
    return module


class Rank:
    """A place in a group of ranks."""

    def __init__(self, rank, size, group, device):
        self.rank, self.size, self.group, self.device = rank, size, group, device

    def rows(self, case):
        """The slice of the whole batch."""
        rows = rows_of(case, self.size)
        return slice(sum(rows[: self.rank]), sum(rows[: self.rank + 1]))

    def share(self, case, step=0):
        """This rank's x and dy."""
        return [t[self.rows(case)].to(self.device) for t in batch(case, self.size, step)]

    def synchronized(self, case):
        module = module_of(torch.nn.SyncBatchNorm, case).to(self.device)
        module.process_group = self.group
        return ours.convert(module)

    def added(self, local):
        """The sum over the ranks."""
        total = local.detach().double()
        dist.all_reduce(total, group=self.group)
        return total

    def equal(self, label, local):
        """Hold that all ranks have the same."""
        both = torch.stack([local.double(), -local.double()])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        self.hold(label, not both.sum(0).any())

    def hold(self, label, good):
        if not good:
            print(f"rank {self.rank} of {self.size}, {label}", flush=True)

    def near(self, label, got, whole, case=None, tolerance=3e-5):
        """Hold that this is the rank's part of a result, or all of it without a case."""
        tolerance = 0.06 if got.dtype == torch.bfloat16 else 2e-3 if "far" in label else tolerance
        right = whole if case is None else whole[self.rows(case)]
        limit = tolerance * max(1.0, float(whole.detach().abs().max()))
        error = (got.detach().cpu().double() - right.detach().double()).abs()
        self.hold(label, error.numel() == 0 or float(error.max()) <= limit)


def steps(module, case, size, part=slice(None), wide=False, device="cpu"):
    """(y, dx, gradients of parameters, buffers) of each step, of some rows; `wide`: in float64."""
    found = []
    for step in range(2):
        x, dy = ((t[part].double() if wide else t[part]).to(device) for t in batch(case, size, step))
        module.zero_grad()
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = module(leaf)
        y.backward(dy)
        gradients = [p.grad.clone() for p in module.parameters()]
        found.append((y.detach(), leaf.grad, gradients, [b.clone() for b in module.buffers()]))
    return found


@functools.cache
def right_steps(case, size):
    theirs = getattr(torch.nn, f"BatchNorm{max(1, len(CASES[case].get('space', (6, 7))))}d")
    return steps(module_of(theirs, case).double(), case, size, wide=True)


def judge_steps(me, case, label):
    mine = steps(me.synchronized(case), case, me.size, me.rows(case), device=me.device)
    for (y, dx, gradients, buffers), right in zip(mine, right_steps(case, me.size), strict=True):
        me.near(f"{label}: y", y, right[0], case)
        me.near(f"{label}: dx", dx, right[1], case)
        for got, wanted in zip(gradients, right[2], strict=True):
            me.near(f"{label}: a gradient", me.added(got).to(got.dtype), wanted)
        for got, wanted in zip(buffers, right[3], strict=True):
            me.near(f"{label}: a buffer", got, wanted)
            me.equal(f"{label}: a buffer differs", got)
        if "last" in case:
            me.hold(f"{label}: layout", all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, dx)))


def twice(module, case, size, part=slice(None), wide=False, device="cpu"):
    """Second derivatives by x and the parameters, of a sum over all rows: of dx squared, and of the parameters' own.

    The last one is the third derivative, by x.
    """
    x = batch(case, size, 0)[0][part]
    leaf = (x.double() if wide else x).to(device, copy=True).requires_grad_()
    leaves = [leaf, *module.parameters()]
    first = torch.autograd.grad((module(leaf) ** 3).sum(), leaves, create_graph=True)
    weights = [randn(70 + number, *one.shape).to(one) for number, one in enumerate(first[1:])]
    penalty = (first[0] ** 2).sum() + sum((one * w).sum() for one, w in zip(first[1:], weights, strict=True))
    found = torch.autograd.grad(penalty, leaves, allow_unused=True, create_graph=True)
    (third,) = torch.autograd.grad((found[0] ** 2).sum(), leaf)
    second = [torch.zeros_like(at) if one is None else one for one, at in zip(found, leaves, strict=True)]
    return [*(one.detach() for one in second), third]


TWICE = ("first", "last", "uneven, last", "an empty rank", "bare", "one axis")


def judge_twice(me, case):
    module = module_of(torch.nn.BatchNorm1d if case == "one axis" else torch.nn.BatchNorm2d, case).double()
    # In the third derivatives of PyTorch's own its statistics are constants.
    module.forward = lambda x: formula(torch, x, module.weight, module.bias)
    right = twice(module, case, me.size, wide=True)
    dx, *parameters, third = twice(me.synchronized(case), case, me.size, me.rows(case), device=me.device)
    me.near(f"{case}: second", dx, right[0], case)
    me.near(f"{case}: third", third, right[-1], case, tolerance=1e-3)
    for got, wanted in zip(parameters, right[1:-1], strict=True):
        me.near(f"{case}: second of a parameter", me.added(got).to(got.dtype), wanted)


def judge_training(me, label, model):
    """Steps of a network, each rank on its share of the batch, end where those of the whole batch do."""
    got, right = trained(model, me.rank, me.size, me.device), trained(network())
    me.hold(f"{label}: names", got.keys() == right.keys())
    for name, wanted in right.items():
        me.near(f"{label}: {name}", got[name], wanted)


def judge_compiled(me):
    """The synchronized calls are left out of the compiler's graphs, and their statistics are not lost."""
    torch._dynamo.utils.counters.clear()
    model = ours.SyncBatchNorm.convert_sync_batchnorm(network(), me.group).to(me.device)
    whole = torch.nn.parallel.DistributedDataParallel(model, process_group=me.group)
    judge_training(me, "compiled", torch.compile(whole, backend="aot_eager"))
    me.hold("compiled: no break, so it was not what ran", sum(torch._dynamo.utils.counters["graph_break"].values()) > 0)


def network():
    torch.manual_seed(4)
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(16, 2),
    )  # fmt: skip


def trained(model, rank=0, size=1, device="cpu"):
    """Parameters and buffers after some steps on a share of the batch; gradients are averages over ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        x = randn(90 + step, 12, 3, 6, 6).contiguous(memory_format=torch.channels_last)
        share = 12 // size
        model(x[rank * share : (rank + 1) * share].to(device)).square().mean().backward()
        optimizer.step()
    return {
        name.removeprefix("_orig_mod.").removeprefix("module."): value.detach().clone()
        for name, value in model.state_dict().items()
    }


def outcome(call, *arguments):
    """The result, or the name of the error."""
    try:
        return call(*arguments)
    except Exception as error:
        return type(error).__name__


def judge_others(me):
    """What is no comparison of steps."""
    model = ours.SyncBatchNorm.convert_sync_batchnorm(network()).to(me.device)
    types = [type(m).__name__ for m in model if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    me.hold("types", types == ["SyncBatchNorm"] * 2)
    judge_training(me, "ddp", torch.nn.parallel.DistributedDataParallel(model))
    whole, (x, _) = batch("first", me.size, 0)[0], me.share("first")
    plain, mine = module_of(torch.nn.BatchNorm2d, "first"), me.synchronized("first")
    me.near("eval", mine.eval()(x), plain.eval()(whole), "first")
    plain.train(), mine.train()
    right = plain(whole)
    with torch.autocast(x.device.type, dtype=torch.bfloat16), torch.no_grad():
        me.near("autocast", mine(x.bfloat16()), right, "first")
    me.near("copy", copy.deepcopy(mine)(x), right, "first")
    bare = ours.SyncBatchNorm(3, affine=False, track_running_stats=False).to(me.device)
    for channels in (5, 1):  # of a module without parameters
        right = torch.nn.functional.batch_norm(whole[:, :channels], None, None, training=True)
        me.near(f"{channels} channels", bare(x[:, :channels]), right, "first")
    mine.weight.requires_grad_(False)
    mine(x).sum().backward()
    me.hold("frozen in part", [p.grad is not None for p in mine.parameters()] == [False, True])
    alone = [dist.new_group([r]) for r in range(me.size)][me.rank]
    single = module_of(functools.partial(ours.SyncBatchNorm, process_group=alone), "first").to(me.device)
    me.near("alone", single(x), plain(whole[me.rows("first")]))
    first = me.rank == 0
    disagreeing = outcome(me.synchronized("first"), x.bfloat16() if first else x)
    me.hold(f"disagreement: {disagreeing}", disagreeing == "ArgumentError")
    again = me.synchronized("first")
    again(x)
    if first:
        again.weight.data = again.weight.data.double()
    outcome(again, x)  # a device says it of the others in the next call
    refused = outcome(again, x)
    me.hold(f"one refused: {refused}", refused == ("ArgumentTypeError" if first else "RankError"))


def unread(module):
    """Have its layers wait for no headers in backward, as those of devices; the number of reads from now on."""
    reads = []
    for joined in module._joined.values():
        joined.layer._reads = False
        begin = joined.layer._memory._begin_read
        joined.layer._memory._begin_read = lambda *given, begin=begin: reads.append(1) or begin(*given)
    return reads


def merged(x, means, inverses, mean, variance, factor, eps, counts):
    """PyTorch's merge of statistics, which it has on GPUs alone."""
    n, avg, spread = torch.zeros(()), torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for m, inverse, count in zip(means, inverses, counts, strict=True):
        share = 1.0 / (n + count)
        spread = spread + (inverse**-2 - eps) * count + (avg - m) ** 2 * n * count * share
        avg = n * share * avg + count * share * m
        n = n + count
    if mean is not None:
        mean.mul_(1 - factor).add_(avg, alpha=factor)
        variance.mul_(1 - factor).add_(spread / (n - 1), alpha=factor)
    return avg, (spread / n + eps).rsqrt()


@contextlib.contextmanager
def as_on_a_device(device):
    """Layers that are made wait for no header; on the CPU with a double of PyTorch's merge."""
    init, made = sync._Ranks.__init__, torch.batch_norm_gather_stats_with_counts

    def device_like(self, *given):
        init(self, *given)
        self.merges, self.layer._reads = True, False

    sync._Ranks.__init__ = device_like
    torch.batch_norm_gather_stats_with_counts = merged if device == "cpu" else made
    try:
        yield
    finally:
        sync._Ranks.__init__, torch.batch_norm_gather_stats_with_counts = init, made


LATER = ("first", "an empty rank", "uneven, last")


def judge_later(me):
    """dx of forwards of several sizes by backwards in another order, and again; none reads a header."""
    module, made = me.synchronized("first"), []
    for case in LATER:
        x, dy = me.share(case)
        leaf = x.requires_grad_()
        made.append((module(leaf), leaf, dy))
    reads = unread(module)
    for turn in range(2):
        found = [torch.autograd.grad(*one, retain_graph=True)[0] for one in made[::-1]][::-1]
        for case, dx in zip(LATER, found, strict=True):
            x, dy = (t.double() for t in batch(case, me.size, 0))
            leaf = x.requires_grad_()
            y = module_of(torch.nn.BatchNorm2d, "first").double()(leaf)
            me.near(f"later, {turn}: {case}", dx, torch.autograd.grad(y, leaf, dy)[0], case)
    me.hold("a header is read", not reads)


def judge_failures(me):
    """What fails on rank 0 is told when the others read its counts, as on a device, where nothing is waited for.

    That is of a backward in the next forward, until when the gradients are NaN; of a forward in backward or the next
    forward. Later steps are right.
    """
    x, dy = me.share("first")
    leaf, first = x.requires_grad_(), me.rank == 0

    def judged(dx):
        return "nan" if dx.isnan().all() else "right" if torch.allclose(dx, right) else "wrong"

    def step():
        return judged(torch.autograd.grad(module(leaf), leaf, dy)[0])

    for last in ("backward", "forward"):
        with as_on_a_device(me.device):
            module = me.synchronized("first")
            module.track_running_stats = False  # the others' would be NaN
            right, weight = torch.autograd.grad(module(leaf), leaf, dy)[0], module.weight.data
            module.weight.data = weight.double() if first else weight
            y = outcome(module, leaf)
            found = [y if isinstance(y, str) else judged(y)]
            module.weight.data = weight
            if last == "forward":
                found.append(outcome(step))
            elif not isinstance(y, str):  # a refused call leaves none
                found.append(outcome(lambda: judged(torch.autograd.grad(y, leaf, dy)[0])))  # noqa: B023
            found.append(outcome(step))
        wanted = ["ArgumentTypeError" if first else "nan", *([] if first and last == "backward" else ["RankError"])]
        me.hold(f"failing forward, {last}: {found}", found == [*wanted, "right"])

    module = me.synchronized("first")
    right, y = torch.autograd.grad(module(leaf), leaf, dy)[0], module(leaf)
    unread(module)
    empty = torch.empty_like

    def full(*given):
        raise torch.cuda.OutOfMemoryError

    torch.empty_like = full if first else empty
    found = [outcome(lambda: judged(torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]))]
    torch.empty_like = empty
    found += [outcome(step), outcome(step)]
    wanted = ["OutOfMemoryError"] * 2 if first else ["nan", "RankError"]
    me.hold(f"failing backward: {found}", found == [*wanted, "right"])


def main(rank, whole, backend, folder):
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False  # of the convolutions, which are compared with those of one process
    limit = datetime.timedelta(seconds=240)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=whole, timeout=limit)
    for size, group in ({2: dist.new_group([0, 1])} | {whole: None}).items():
        if rank >= size:
            continue
        me = Rank(rank, size, group, device)
        for case in CASES:
            judge_steps(me, case, case)
            with as_on_a_device(device):
                judge_steps(me, case, f"merged, {case}")
            if case in TWICE:
                judge_twice(me, case)
        if size == 2 and hasattr(torch, "compile"):
            judge_compiled(me)
    me = Rank(rank, whole, None, device)
    judge_others(me)
    judge_later(me)
    judge_failures(me)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
