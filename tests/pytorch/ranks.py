"""One of 2 or 3 ranks: ``python ranks.py RANK SIZE BACKEND FOLDER``; the tests read what it leaves there.

BACKEND is that of ``torch.distributed``: gloo on the CPU, or nccl with a GPU for each rank.

Every rank makes the whole batch from a seed and computes its own rows of it, of all ranks and of the first two.
"""

import contextlib
import copy
import datetime
import sys
import warnings

warnings.filterwarnings("ignore")  # PyTorch without NumPy, and its own of processes

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

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
STEPS = 2


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


def part_of(case, size, rank):
    rows = rows_of(case, size)
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def steps(module, case, size, part=slice(None), wide=False, device="cpu"):
    """(y, dx, gradients of parameters, buffers) of each step, of some rows; `wide`: in float64."""
    found = []
    for step in range(STEPS):
        x, dy = ((t[part].double() if wide else t[part]).to(device) for t in batch(case, size, step))
        module.zero_grad()
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = module(leaf)
        y.backward(dy)
        gradients = [p.grad.clone() for p in module.parameters()]
        found.append((y.detach(), leaf.grad, gradients, [b.clone() for b in module.buffers()]))
    return found


class Formula(torch.nn.Module):
    """A training batch norm by elementary operations; in PyTorch's third derivatives its statistics are constants."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x):
        axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        centred = x - x.mean(axes, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + self.eps)
        return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


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


def compiled(rank, size, group, device):
    """Steps of a compiled network with two synchronized batch norms, and how often the compiler broke off."""
    torch._dynamo.utils.counters.clear()
    model = ours.SyncBatchNorm.convert_sync_batchnorm(network(), group).to(device)
    whole = torch.compile(torch.nn.parallel.DistributedDataParallel(model, process_group=group), backend="aot_eager")
    state = trained(whole, rank, size, device)
    return {"state": state, "breaks": sum(torch._dynamo.utils.counters["graph_break"].values())}


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


def others(rank, size, device):
    """What is no comparison of steps."""
    found = {}
    model = ours.SyncBatchNorm.convert_sync_batchnorm(network()).to(device)
    found["types"] = [type(m).__name__ for m in model if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    found["ddp"] = trained(torch.nn.parallel.DistributedDataParallel(model), rank, size, device)
    mine = module_of(ours.SyncBatchNorm, "first").to(device)
    x = batch("first", size, 0)[0][part_of("first", size, rank)].to(device)
    mine.eval()
    found["eval"] = mine(x).detach()
    mine.train()
    with torch.autocast(x.device.type, dtype=torch.bfloat16), torch.no_grad():
        found["autocast"] = mine(x.bfloat16())
    found["copy"] = copy.deepcopy(mine)(x).detach()
    bare = ours.SyncBatchNorm(3, affine=False, track_running_stats=False).to(device)
    found["channels"] = [bare(some).detach() for some in (x, x[:, :1])]
    mine.weight.requires_grad_(False)  # frozen in part
    mine(x).sum().backward()
    found["frozen in part"] = [p.grad is not None for p in mine.parameters()]
    alone = [dist.new_group([r]) for r in range(size)][rank]
    single = module_of(lambda *a, **o: ours.SyncBatchNorm(*a, process_group=alone, **o), "first").to(device)
    found["alone"] = single(x).detach()
    wrong = module_of(ours.SyncBatchNorm, "first").to(device)
    try:  # in the constructor's collective, and in that of a call
        wrong(x.bfloat16() if rank == 0 else x)
        found["disagreement"] = "nothing"
    except Exception as error:
        found["disagreement"] = type(error).__name__
    again = module_of(ours.SyncBatchNorm, "first").to(device)
    again(x)
    if rank == 0:
        again.weight.data = again.weight.data.double()
    for _ in range(2):  # a device says it of the others in the next call
        try:
            again(x)
            found["one refused"] = "nothing"
        except Exception as error:
            found["one refused"] = type(error).__name__
    return found


LATER = ("first", "an empty rank", "uneven, last")


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


def failing_forward(rank, size, device, last):
    """A forward that rank 0 refuses; what each rank's backward or next forward is, and the step after it."""
    module, found = module_of(ours.SyncBatchNorm, "first").to(device), []
    module.track_running_stats = False  # the others' would be NaN
    x, dy = (t[part_of("first", size, rank)].to(device) for t in batch("first", size, 0))
    leaf = x.requires_grad_()
    right, weight = torch.autograd.grad(module(leaf), leaf, dy)[0], module.weight.data
    for turn in range(3):
        module.weight.data = weight.double() if rank == turn == 0 else weight
        try:
            if turn == 0:
                y = found  # what a refused call leaves
                y = module(leaf)
                found.append("nan" if y.isnan().all() else "wrong")
            elif turn == 1 and last == "backward":
                if y is found:
                    found.append("")
                else:
                    torch.autograd.grad(y, leaf, dy)
            else:
                dx = torch.autograd.grad(module(leaf), leaf, dy)[0]
                found.append("right" if torch.allclose(dx, right) else "wrong")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def later(rank, size, device):
    """dx of forwards of several sizes by backwards in another order; again; and how often headers are read."""
    module, made = module_of(ours.SyncBatchNorm, "first").to(device), []
    for case in LATER:
        x, dy = (t[part_of(case, size, rank)].to(device) for t in batch(case, size, 0))
        leaf = x.requires_grad_()
        made.append((module(leaf), leaf, dy))
    reads = unread(module)
    found = [[torch.autograd.grad(*one, retain_graph=True)[0] for one in made[::-1]][::-1] for _ in range(2)]
    return *found, len(reads)


def failing_backward(rank, size, device):
    """What a backward for which one rank has no memory is, the next forward, and the step after it."""
    module = module_of(ours.SyncBatchNorm, "first").to(device)
    x, dy = (t[part_of("first", size, rank)].to(device) for t in batch("first", size, 0))
    leaf = x.requires_grad_()

    def step():
        return torch.autograd.grad(module(leaf), leaf, dy)[0]

    right, y = step(), module(leaf)
    unread(module)
    found, empty = [], torch.empty_like

    def full(*given):
        raise torch.cuda.OutOfMemoryError

    for failing in (rank == 0, False, False):
        try:
            if failing:
                torch.empty_like = full
            dx = torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] if not found else step()
            found.append("nan" if dx.isnan().all() else "right" if torch.allclose(dx, right) else "wrong")
        except Exception as error:
            found.append(type(error).__name__)
        finally:
            torch.empty_like = empty
    return found


def main(rank, whole, backend, folder):
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False  # of the convolutions, which are compared with those of one process
    limit = datetime.timedelta(seconds=240)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=whole, timeout=limit)
    found = {}
    for size, group in ({2: dist.new_group([0, 1])} | {whole: None}).items():
        for case in CASES if rank < size else ():
            module = module_of(torch.nn.SyncBatchNorm, case).to(device)
            module.process_group = group
            part = part_of(case, size, rank)
            found[size, case] = steps(ours.convert(module), case, size, part, device=device)
            if case in TWICE:
                found["twice", size, case] = twice(module, case, size, part, device=device)
            module = module_of(torch.nn.SyncBatchNorm, case).to(device)
            module.process_group = group
            with as_on_a_device(device):
                found["merged", size, case] = steps(ours.convert(module), case, size, part, device=device)
        if size == 2 and rank < size and hasattr(torch, "compile"):
            found["compiled"] = compiled(rank, size, group, device)
    found |= others(rank, whole, device)
    with as_on_a_device(device):
        for last in ("backward", "forward"):
            found["failing forward", last] = failing_forward(rank, whole, device, last)
    found["later"], found["failing backward"] = later(rank, whole, device), failing_backward(rank, whole, device)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
