"""``convert(model, fuse=True)``: the model computes what it did, with fewer steps, and keeps all else."""

import copy
import functools
import io
import itertools
import random

import pytest

import pybnorm


@pytest.fixture(scope="module")
def nets(torch, ours, device):
    """Small models, by PyTorch's modules; `here` on the device that is tested."""
    nn = torch.nn

    class Block(nn.Module):
        """Of a ResNet: the ReLU used twice and in place."""

        def __init__(self, given, made, in_place=True):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made)
            self.conv2, self.bn2 = nn.Conv2d(made, made, 3, padding=1, bias=False), nn.BatchNorm2d(made)
            self.relu = nn.ReLU(inplace=in_place)
            self.down = None
            if given != made:
                self.down = nn.Sequential(nn.Conv2d(given, made, 1, bias=False), nn.BatchNorm2d(made))

        def forward(self, x):
            identity = x
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            if self.down is not None:
                identity = self.down(x)
            out += identity
            return self.relu(out)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
            self.one, self.two = Block(6, 6), Block(6, 8, in_place=False)
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 5), nn.BatchNorm1d(5, affine=False), nn.ReLU())

        def forward(self, x):
            x = self.one(self.one(self.stem(x)))  # shared: its batch norms see two batches a step
            return self.head(self.two(x))

    def made():
        torch.manual_seed(3)
        net = Net().to(device)
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.weight.uniform_(-1.0, 1.5)
                    module.bias.uniform_(-0.5, 0.5)
        return net

    return made


def joined(model):
    """The modules that have another ``forward``."""
    return sorted(name for name, module in model.named_modules() if "forward" in vars(module))


def images(torch, device, step, dtype=None, layout=None):
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(device, dtype or torch.float32)
    return x.contiguous(memory_format=layout or torch.contiguous_format)


def close(torch, got, right, share=2e-4):
    got, right = got.detach().double(), right.detach().double()
    assert float((got - right).abs().max()) <= share * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("layout", ["first", "last"])
def test_a_fused_model_trains_and_evaluates_as_pytorchs(torch, ours, device, nets, layout):
    memory = torch.channels_last if layout == "last" else torch.contiguous_format
    theirs = nets().to(memory_format=memory)
    mine = ours.convert(copy.deepcopy(theirs), fuse=True)
    assert joined(mine) == ["head", "one", "stem", "two"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in (theirs, mine)]
    for step, training in enumerate([True, True, False, True]):
        x, outputs = images(torch, device, step, layout=memory), []
        for model, optimizer in zip((theirs, mine), optimizers, strict=True):
            model.train(training)
            optimizer.zero_grad()
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().mean().backward()
            outputs.append([y, leaf.grad, *(p.grad for p in model.parameters())])
            optimizer.step()
        for right, got in zip(*outputs, strict=True):
            close(torch, got, right, 2e-3)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    for name, right in theirs.state_dict().items():
        close(torch, mine.state_dict()[name], right, 2e-3)


def test_a_fused_step_is_no_less_accurate(torch, ours, device, nets):
    """By the whole step's distance from that of PyTorch's modules in float64, of models with 16-bit data too."""
    plain = nets()
    for dtype, training in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        steps = []
        for kind, change in (
            (torch.float64, None),
            (dtype, ours.convert),
            (dtype, functools.partial(ours.convert, fuse=True)),
        ):
            model = copy.deepcopy(plain).train(training)
            model = model.double() if change is None else change(model)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
                y = model(images(torch, device, 1).to(torch.float64 if change is None else torch.float32))
            y.square().mean().backward()
            found = [y, *(p.grad for p in model.parameters()), *model.buffers()]
            steps.append(torch.cat([t.detach().double().flatten() for t in found]))
        right, *apart = steps
        unfused, fused = ((one - right).norm() / right.norm() for one in apart)
        assert fused <= 1.2 * unfused + 1e-6, (dtype, training)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of cycles, of which there is one
def test_steps_are_fewer(torch, ours, device, nets):
    if not hasattr(torch, "profiler"):
        pytest.skip("this PyTorch has no profiler")
    counts = []
    for fuse in (False, True):
        model = ours.convert(nets(), fuse=fuse)
        with torch.profiler.profile() as profile:
            model(images(torch, device, 1))
        names = [event.name for event in profile.events()]
        counts.append([names.count(name) for name in ("aten::relu", "aten::add", "aten::relu_", "aten::add_")])
    # Every sum and ReLU of training is computed in the memory of batch norm's result.
    assert [sum(counts[0][:2]) > 0, sum(counts[1][:2]), sum(counts[1][2:]) > 0] == [True, 0, True]


def test_what_is_kept_and_what_unfuse_gives_back(torch, ours, device, nets):
    from pybnorm.torch import fusion

    plain = ours.convert(nets())
    tensors = {name: id(value) for name, value in [*plain.named_parameters(), *plain.named_buffers()]}
    modules = {name: (id(m), type(m)) for name, m in plain.named_modules()}
    contents = {name: set(vars(m)) for name, m in plain.named_modules()}
    training = [m.training for m in plain.modules()]
    state = (random.getstate(), torch.get_rng_state())
    fused = ours.convert(plain, fuse=True)
    assert fused is plain
    assert joined(fused)
    assert (state[0], True) == (random.getstate(), torch.equal(state[1], torch.get_rng_state()))
    assert {name: id(value) for name, value in [*fused.named_parameters(), *fused.named_buffers()]} == tensors
    assert {name: (id(m), type(m)) for name, m in fused.named_modules()} == modules
    assert [m.training for m in fused.modules()] == training
    again = joined(fused)
    assert joined(ours.convert(fused, fuse=True)) == again
    twin = copy.deepcopy(fused)
    fused.eval()
    twin.eval()
    x = images(torch, device, 2)
    with torch.no_grad():
        for parameter in fused.one.parameters():
            parameter.mul_(1.5)  # the copy has its own
        assert not torch.equal(twin(x), fused(x))
        twin.load_state_dict(fused.state_dict())
        right = twin(x)
    assert torch.equal(right, fused(x))
    assert fusion.unfuse(fused) is fused
    assert not joined(fused)
    assert {name: set(vars(m)) for name, m in fused.named_modules()} == contents
    assert torch.equal(fused(x), right)
    assert type(fused.one.bn1) is ours.BatchNorm2d


def test_hooks_are_called_with_what_they_were(torch, ours, device, nets):
    theirs = nets()
    seen = ([], [])
    mine = copy.deepcopy(theirs)
    for model, calls in zip((theirs, mine), seen, strict=True):
        model.one.bn1.register_forward_hook(lambda m, given, y, calls=calls: calls.append(y.detach().clone()))
        model.two.relu.register_forward_hook(lambda m, given, y, calls=calls: calls.append(y.detach().clone()))
        model.stem[1].register_full_backward_hook(lambda m, dx, dy, calls=calls: calls.append(dy[0].clone()))
        model.one.register_forward_hook(lambda m, given, y, calls=calls: calls.append(y.detach().clone()))
        model.head[3].register_forward_pre_hook(lambda m, given, calls=calls: calls.append(given[0].detach().clone()))
    ours.convert(mine, fuse=True)
    assert joined(mine) == ["one"]
    for model in (theirs, mine):
        model(images(torch, device, 4)).square().sum().backward()
    assert len(seen[0]) == len(seen[1]) == 8
    for right, got in zip(*seen, strict=True):
        close(torch, got, right, 5e-3)


def variants(torch):
    """By name: forwards over self.conv, self.bn, self.relu and self.steps that cannot be joined, and that can."""

    def wider_in_place(self, x):
        y = self.bn(self.conv(x))
        y += x.double()
        return torch.nn.functional.relu(y)

    def other_gets_the_sum(self, x):
        z = x * 1.0
        z += self.bn(self.conv(x))
        return z.relu() * z

    def other_is_kept(self, x):
        kept = z = x * 1.0
        z += self.bn(self.conv(x))
        return z.relu() * kept

    def changed_behind(self, x):
        z = self.conv(x)
        y = self.bn(z)
        z.mul_(0.5)
        return (y + x).relu()

    def changed_behind_hook(self, x):
        x = x * 1.0
        y = self.bn(self.conv(x))
        x.mul_(0.5)
        return (y + x).relu()

    def changed_in_between(self, x):
        x = x * 1.0
        y = self.bn(x)
        x.mul_(0.5)
        return (y + x).relu()

    def notes(self, x):
        self.seen = True
        return self.relu(self.bn(x))

    def by_another_name(self, x):
        y = kept = self.relu(self.bn(x)) * 1.0
        y += 1.0
        return kept * 2

    def counts(self, x):
        self.steps.add_(1)
        return self.relu(self.bn(x)) * self.steps

    def counts_aside(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.relu(self.bn(x)) * self.calls

    alone = {
        "used again": lambda m, x: m.relu(y := m.bn(x)) + y,
        "sum used again": lambda m, x: (y := m.bn(m.conv(x)) + x).relu() + y,
        "scaled": lambda m, x: torch.add(m.bn(m.conv(x)), x, alpha=2).relu(),
        "doubled": lambda m, x: ((y := m.bn(x)) + y).relu(),
        "by mode": lambda m, x: (m.relu if m.training else torch.tanh)(m.bn(x)),
        "by type": lambda m, x: m.relu(m.bn(x)) * (1 if isinstance(x, torch.Tensor) else 0),
        "by chance": lambda m, x: m.relu(m.bn(x)) * (float(torch.rand(1)) if m.training else 0.5),
        "draws": lambda m, x: torch.rand(1) is not None and m.relu(m.bn(x)),
        "by value": lambda m, x: m.relu(m.bn(x)) * (1 if x.sum() > 0 else -1),
    }
    joined = {
        "broadcast": lambda m, x: m.relu(m.bn(m.conv(x)) + x.mean((2, 3), keepdim=True)),
        "a number": lambda m, x: (m.bn(m.conv(x)) + 0.25).relu(),
        "wider": lambda m, x: torch.nn.functional.relu(m.bn(m.conv(x)) + x.double()),
        "narrower": lambda m, x: (m.bn(m.conv(x)) + x.half()).relu(),
        "by functions": lambda m, x: torch.add(x, m.bn(m.conv(torch.nn.functional.relu(x)))).relu(),
        "in place": lambda m, x: torch.nn.functional.relu(m.bn(x), inplace=True) * 2,
        "twice": lambda m, x: m.relu(m.bn(m.conv(m.relu(m.bn(x)))) + x),
        "optional": lambda m, x, scale=None: m.relu(m.bn(x)) if scale is None else m.relu(m.bn(x)) * scale,
    }
    alone |= {f.__name__: f for f in (other_gets_the_sum, other_is_kept, changed_behind, changed_behind_hook)}
    alone |= {f.__name__: f for f in (changed_in_between, notes, counts_aside)}
    return alone, joined | {f.__name__: f for f in (wider_in_place, by_another_name, counts)}


def test_models_that_are_hard_to_see_through(torch, ours, device):
    alone, both = variants(torch)
    for name, forward in (alone | both).items():

        class Small(torch.nn.Module):
            def __init__(self, name):
                super().__init__()
                self.conv, self.bn = torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3)
                self.relu = torch.nn.ReLU(inplace=name != "used again")
                self.register_buffer("steps", torch.zeros(()))
                if name == "changed_behind_hook":
                    self.conv.register_forward_hook(lambda m, given, y: given[0])

        Small.forward = forward
        torch.manual_seed(7)
        plain = ours.convert(Small(name).to(device))
        fused = ours.convert(copy.deepcopy(plain), fuse=True)
        assert bool(joined(fused)) == (name in both), name
        assert float(fused.steps) == 0
        for training in (True, True, False):
            results = []
            for model in (plain, fused):
                model.train(training)
                torch.manual_seed(11)
                x = images(torch, device, 5).requires_grad_()
                changed = name.startswith("changed")  # a derivative of that is PyTorch's error
                with torch.set_grad_enabled(not changed):
                    y = model(x)
                if not changed:
                    y.square().sum().backward()
                found = [y, y if changed else x.grad, model.bn.running_mean, model.steps]
                if name == "optional":
                    found.append(model(x, scale=images(torch, device, 6)[:, :, :1, :1]))
                results.append(found)
            for right, got in zip(*results, strict=True):
                assert got.dtype == right.dtype, name
                assert torch.equal(got, right) or device != "cpu", name


def test_pairs_that_are_told(torch, ours, device):
    from pybnorm.torch import fusion

    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = torch.nn.BatchNorm2d(3), torch.nn.ReLU()

        def forward(self, x):
            y = self.act(self.first(x))
            return y if x.sum() > 0 else -y  # torch.fx cannot follow

    plain = ours.convert(Sums().to(device))
    assert not joined(ours.convert(copy.deepcopy(plain), fuse=True))
    fused = ours.convert(copy.deepcopy(plain), fuse=[("first", "act")])
    assert joined(fused) == ["act", "first"]
    x = images(torch, device, 8)
    for model in (plain, copy.deepcopy(fused), fused):
        assert torch.equal(model(x), plain(x))
    assert not joined(fusion.unfuse(fused))
    for bad, match in (
        ([("first", "nothing")], "nothing"), ([("act", "first")], "act"), ("first", "first"), ([("first",)], "first"),
        (1, "1"),
    ):  # fmt: skip
        with pytest.raises(pybnorm.ArgumentError, match=match):
            ours.convert(plain, fuse=bad)
        assert not joined(plain)
    with pytest.raises(pybnorm.ArgumentTypeError, match="model"):
        ours.unconvert(None)


def test_a_fused_model_is_saved_whole(torch, ours, device):
    model = ours.convert(torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.ReLU()).to(device), fuse=True)
    assert joined(model)
    x = images(torch, device, 9)
    file = io.BytesIO()
    torch.save(model.eval(), file)
    file.seek(0)
    options = {} if torch.__version__.startswith("1.") else {"weights_only": False}
    assert torch.equal(torch.load(file, **options)(x), model(x))
