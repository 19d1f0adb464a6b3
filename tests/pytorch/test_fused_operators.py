"""Batch norm, an addition and ReLU as operators that compilers see: results, and that both directions go one way."""

import copy

import pytest

import pybnorm

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own

SHAPE = 4, 8, 5, 6


def drawn(torch, device, *shape, seed=0, dtype="float32", last=True):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, getattr(torch, dtype))
    return values.contiguous(memory_format=torch.channels_last) if last and len(shape) == 4 else values


def vectors(torch, device):
    """Weight, bias and running statistics."""
    weight, bias, mean, variance = (drawn(torch, device, SHAPE[1], seed=n) for n in (2, 3, 4, 5))
    return weight, bias, mean, variance.abs() + 0.5


def same(torch, got, wanted, tolerance=2e-4):
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.fixture
def joined(operators):
    """The module; kernels in C ask for plans anew."""
    import pybnorm.torch.fused_operators

    pybnorm.torch.fused_operators.fused.ready.clear()
    yield pybnorm.torch.fused_operators
    pybnorm.torch.fused_operators.fused.ready.clear()


@pytest.fixture
def blocks(torch, ours, device):
    """A model with both kinds of activations, fused; alike each time."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
            self.one, self.two = torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8, momentum=None)
            self.relu = torch.nn.ReLU()

        def forward(self, x):
            y = self.relu(self.one(self.first(x)))
            return self.relu(self.two(self.second(y)) + x)

    torch.manual_seed(3)
    model = torch.nn.Sequential(Block(), Block()).to(device).to(memory_format=torch.channels_last)
    return lambda: ours.convert(copy.deepcopy(model), fuse=True)


def step(torch, model, x):
    """Everything that a step changes: y, gradients, buffers."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    (y.float() ** 3).mean().backward()
    return [y.detach(), leaf.grad, *[p.grad for p in model.parameters()], *model.buffers()]


# ---------------------------------------------------------------- the operators


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("residual", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("operation", ["training", "backward"])
def test_operators_are_registered_as_they_behave(torch, operators, joined, device, operation, residual):
    channels = 3  # so few are fused nowhere: the reserve of fused plans has bytes that nobody writes
    x, z, dy = (drawn(torch, device, 4, channels, 5, 6, seed=n).requires_grad_(n < 2) for n in range(3))
    weight, bias, mean, variance = (v[:channels].clone() for v in vectors(torch, device))
    z, rest = z if residual else None, (0.1, 1e-5, False, False)
    found = joined.training(x.detach(), weight, bias, None, None, z if z is None else z.detach(), *rest)
    given = {
        "training": (x, weight.requires_grad_(), bias.requires_grad_(), mean, variance, z, *rest),
        "backward": (x, dy.requires_grad_(), weight, bias, *found, residual, False, *rest),
    }  # fmt: skip
    call = getattr(operators, f"batch_norm_relu_{operation}").default
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in given[operation]]
    for arguments in (given[operation], tuple(plain)):  # backward is another one where its own derivative is wanted
        assert set(torch.library.opcheck(call, arguments).values()) == {"SUCCESS"}
    assert [a.name for a in call._schema.arguments if a.alias_info is not None and a.alias_info.is_write] == (
        ["running_mean", "running_var"] if operation == "training" else []
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("residual", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_inductor_lowers_the_operators(torch, joined, device, last, dtype, residual):
    """Alone: without another operation there is nothing that would need Triton or a compiler of C++."""
    x, z, dy = (drawn(torch, device, *SHAPE, seed=n, dtype=dtype, last=last) for n in range(3))
    results, call = [], torch.compile(joined.batch_norm_relu, backend="inductor", fullgraph=True)
    for compiled in (False, True):
        weight, bias, mean, variance = (v.clone() for v in vectors(torch, device))
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias, *([z] if residual else []))]
        other = leaves[3] if residual else None
        if compiled:
            y = call(leaves[0], mean, variance, *leaves[1:3], other, 0.1, 1e-5, False, False)
        else:
            y = torch.nn.functional.batch_norm(leaves[0].float(), mean, variance, *leaves[1:3], True)
            y = y if other is None else y + other
            dy = torch.where(y.detach().abs() < 0.05, 0, dy)  # near ReLU's corner
            y = y.relu().to(x.dtype)
        y.backward(dy)
        assert y.stride() == leaves[0].grad.stride() == x.stride()
        results.append([y.detach(), *(leaf.grad for leaf in leaves), mean, variance])
    same(torch, *results, 5e-5 if dtype == "float32" else 0.05)


def test_a_second_derivative_is_that_of_pytorch_in_float64(torch, joined, device):
    x, z, direction = (drawn(torch, device, *SHAPE, seed=n) for n in range(3))
    weight, bias = vectors(torch, device)[:2]

    def second(kind):
        leaves = [t.to(kind).clone().requires_grad_() for t in (x, weight, bias, z)]
        if kind == torch.float32:
            y = joined.batch_norm_relu(leaves[0], None, None, *leaves[1:], 0.1, 1e-5, False, False)
        else:
            y = (torch.nn.functional.batch_norm(leaves[0], None, None, *leaves[1:3], True) + leaves[3]).relu()
        first = torch.autograd.grad((y**3).mean(), leaves, create_graph=True)
        total = (first[0] * direction.to(kind)).sum() + first[1].pow(2).sum() + (first[3] ** 2).sum()
        return torch.autograd.grad(total, leaves)

    for got, right in zip(second(torch.float32), second(torch.float64), strict=True):
        assert (got - right).abs().max() <= 2e-5 * right.abs().max()


def test_transforms_take_the_operators_apart(torch, joined, device):
    x, z = (drawn(torch, device, 3, *SHAPE, seed=n) for n in range(2))
    weight, bias, mean, variance = vectors(torch, device)

    def mine(x, z, weight):
        y = joined.batch_norm_relu(x, None, None, weight, bias, z, 0.1, 1e-5, False, False)
        return (y**3).mean()

    def theirs(x, z, weight):
        y = torch.nn.functional.batch_norm(x, None, None, weight, bias, True) + z
        return (y.relu() ** 3).mean()

    found, wanted = (torch.func.grad(function, (0, 1, 2)) for function in (mine, theirs))
    same(torch, found(x[0], z[0], weight), wanted(x[0], z[0], weight))
    for places in ((0, 0, None), (0, None, None)):
        given = x, z[0] if places[1] is None else z, weight
        same(torch, *(torch.vmap(function, places)(*given) for function in (found, wanted)))
    with torch.no_grad():
        given = weight, bias, None, None, None, 0.1, 1e-5, False, False
        y, *saved = torch.vmap(joined.training, (0, *(None,) * 9))(x, *given)
        backward = torch.vmap(joined.backward, (0, 0, None, None, 0, 0, 0, 0, *(None,) * 6))
        found = backward(x, z, weight, bias, y, *saved, False, False, 0.1, 1e-5, False, False)
    for n in range(3):
        leaf = x[n].clone().requires_grad_()
        right = torch.nn.functional.batch_norm(leaf, None, None, weight, bias, True).relu()
        same(torch, [y[n], found[0][n]], [right.detach(), torch.autograd.grad(right, leaf, z[n])[0]])
    with pytest.raises(pybnorm.ArgumentError, match="vmap"):
        torch.vmap(lambda x: joined.batch_norm_relu(x, mean, variance, weight, bias, None, 0.1, 1e-5, False, False))(x)


def test_autograd_is_told_that_statistics_are_written(torch, joined, device):
    weight, bias, mean, variance = vectors(torch, device)
    before = mean._version, variance._version
    joined.batch_norm_relu(drawn(torch, device, *SHAPE), mean, variance, weight, bias, None, 0.1, 1e-5, False, False)
    assert mean._version > before[0]
    assert variance._version > before[1]


def test_what_is_wrong_is_told_and_nothing_is_written(torch, joined, device):
    x = drawn(torch, device, *SHAPE)
    weight, bias, mean, variance = vectors(torch, device)
    before = mean.clone()
    for z in (x[:2], x.half(), x[..., :1]):
        with pytest.raises(pybnorm.ArgumentError, match="residual"):
            joined.batch_norm_relu(x, mean, variance, weight, bias, z, 0.1, 1e-5, False, False)
    with pytest.raises(pybnorm.ArgumentError, match="running_mean"):
        joined.batch_norm_relu(x, mean, None, weight, bias, None, 0.1, 1e-5, False, False)
    with pytest.raises(pybnorm.ArgumentError, match="more than one value"):
        joined.batch_norm_relu(x[:1, :, :1, :1], mean, variance, weight, bias, None, 0.1, 1e-5, False, False)
    assert torch.equal(mean, before)


# ---------------------------------------------------------------- compilers and exporters


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_calls_them_and_makes_the_steps_of_the_plain_one(
    torch, ours, blocks, operators, joined, device, monkeypatch
):
    monkeypatch.setattr(ours.BatchNorm2d, "_has_operator", lambda self, input, residual: True)
    plain, mine, seen = blocks(), blocks(), []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(mine, fullgraph=True, backend=backend)
    for number, training in enumerate([True, True, False]):
        x = drawn(torch, device, *SHAPE, seed=number)
        plain.train(training), mine.train(training)
        same(torch, step(torch, compiled, x), step(torch, plain, x))
        assert seen.count(joined.training) == 4  # those of training; evaluation has none
        assert seen.count(operators.batch_norm_training.default) == 0
        assert seen.count(operators.batch_norm_inference.default) == (0 if training else 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["shape", "no parameters", "preferred", "apart", "layout"])
def test_what_the_operator_does_not_take_is_compiled_too(torch, ours, operators, joined, device, what, monkeypatch):
    import pybnorm.torch.fused

    module = ours.BatchNorm2d(8, affine=what != "no parameters", device=device)
    module.prefer = "fastest" if what == "preferred" else None
    module.joins = what != "apart"
    other, seen = copy.deepcopy(module), []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x, z = (drawn(torch, device, *SHAPE, seed=n, last=what != "layout") for n in range(2))
    z = z[:1] if what == "shape" else z
    right = other(x, activation="relu", residual=z)
    if what != "layout":  # channels first, of which there are no fused plans
        monkeypatch.setattr(pybnorm.torch.fused, "fits", lambda x, vectors: all(v is not None for v in vectors))
    found = compiled(x, activation="relu", residual=z)
    same(torch, [found, *module.buffers()], [right, *other.buffers()])
    assert joined.training not in seen
    assert operators.batch_norm_training.default in seen


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_evaluation_is_exported(torch, blocks, operators, device):
    model, x = blocks().eval(), drawn(torch, device, *SHAPE)
    exported = torch.export.export(model, (x,))
    assert [node.target for node in exported.graph.nodes].count(operators.batch_norm_inference.default) == 4
    torch.testing.assert_close(exported.module()(x), model(x))


# ---------------------------------------------------------------- which way a call takes


class Plans:
    """In place of fused plans: computes by itself, and knows a residual's signs by what forward has left alone."""

    def __init__(self, torch, reserve_size):
        self.torch, self.reserve_size, self.made, self.seen = torch, reserve_size, [], []

    def look_at(self, *tensors):
        self.seen.extend(tensors)
        assert all(t is None or t.data_ptr() % 16 == 0 for t in tensors)

    def forward(self, x, weight, bias, residual, mean, variance, reserve):
        self.look_at(x, weight, bias, residual, mean, variance, reserve)
        assert all(v is None or v.dtype == self.torch.float32 for v in (mean, variance))
        y, saved, inverse = self.torch.native_batch_norm(x, weight, bias, mean, variance, True, 0.25, 1e-5)
        if residual is not None:
            assert residual.stride() == x.stride()
            assert reserve.numel() == self.reserve_size
            y += residual
            reserve.copy_((y > 0).flatten()[: self.reserve_size])
        self.made.append("forward")
        return y.relu_(), saved, inverse, reserve

    def backward(self, x, dy, weight, bias, y, saved, inverse, reserve):
        self.look_at(x, dy, weight, bias, y, saved, inverse, reserve)
        assert dy.stride() == x.stride()
        dz = self.torch.where(y > 0, dy, 0)
        if reserve is not None:
            assert self.torch.equal(reserve.bool(), (y > 0).flatten()[: self.reserve_size])
        self.made.append("backward")
        native = self.torch.ops.aten.native_batch_norm_backward
        return *native(dz, x, weight, None, None, saved, inverse, True, 1e-5, [True] * 3), dz


@pytest.fixture
def plans(torch, joined, monkeypatch):
    """Makes fused plans be there, on any device."""

    def there(reserve_size, fits=lambda x, given: all(v.dtype == torch.float32 for v in given)):
        found = Plans(torch, reserve_size)
        joined.fused.ready.clear()  # which kernels in C may have asked for
        monkeypatch.setattr(joined.fused, "fits", fits)
        monkeypatch.setattr(joined.fused, "_plans_of", lambda *question, known: found)
        monkeypatch.setattr(joined, "_absent", set())
        return found

    return there


def odd(torch, tensor):
    """The same in memory that is aligned to its elements alone."""
    whole = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    found = whole[1:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)
    assert found.data_ptr() % 16
    return found


@pytest.mark.parametrize("residual", [False, True], ids=["activation", "residual"])
@pytest.mark.parametrize("what", ["as it is", "addresses", "other strides", "halves of statistics"])
def test_fused_plans_get_what_they_take(torch, joined, plans, device, what, residual):
    x, z, dy = (drawn(torch, device, *SHAPE, seed=n) for n in range(3))
    weight, bias, mean, variance = vectors(torch, device)
    change = {"addresses": lambda t: odd(torch, t), "other strides": lambda t: t.contiguous()}.get(what, lambda t: t)
    z, dy = change(z), change(dy)
    if what == "addresses":
        x, weight, bias, mean, variance = (odd(torch, t) for t in (x, weight, bias, mean, variance))
    elif what == "halves of statistics":
        mean, variance = mean.half(), variance.half()
    found, leaves = plans(16 if residual else 0), []
    given = x, weight, bias, *([z] if residual else [])
    leaves = [t.detach().requires_grad_() for t in given]
    right = [t.detach().clone().requires_grad_() for t in given]
    running = [mean.float(), variance.float()]
    running = [t.clone() for t in running]
    y = joined.batch_norm_relu(
        leaves[0], mean, variance, *leaves[1:3], leaves[3] if residual else None, 0.25, 1e-5, False, False
    )
    y.backward(dy)
    assert found.made == ["forward", "backward"]
    other = torch.nn.functional.batch_norm(right[0], *running, *right[1:3], True, 0.25)
    other = (other + right[3] if residual else other).relu()
    other.backward(dy)
    same(torch, [y, *(t.grad for t in leaves)], [other, *(t.grad for t in right)])
    same(torch, [mean.float(), variance.float()], running, 1e-3 if what == "halves of statistics" else 1e-5)
    assert y.stride() == leaves[0].grad.stride() == x.stride()


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [((2, 2048, 2, 2), 9216), ((128, 200, 56, 56), 12846080), ((1, 4096, 14, 14), 115712), ((7, 96, 13, 9), 14336),
     ((128, 8, 2, 2), 5120), ((32, 1000, 7, 7), 201728)],
)  # fmt: skip
def test_shapes_promise_what_the_plans_of_cudnn_need(torch, joined, shape, nbytes):
    """By reserve_size of plans "ex" on an H200, cuDNN 9.19."""
    assert nbytes <= joined._reserve_size(torch.empty(shape, device="meta"), True) <= nbytes + 4096


def test_a_reserve_that_shapes_do_not_promise_is_none_of_it(torch, joined, plans, device):
    x = drawn(torch, device, *SHAPE)
    weight, bias, *_ = vectors(torch, device)
    call = [x, weight, bias, None, None, x, 0.1, 1e-5, False, False]
    size = joined.training(*call)[3].numel()
    assert x.numel() // 8 < size < x.numel() // 8 + 8192
    for reserve_size, made in ((size, ["forward"]), (size + 1, [])):
        found = plans(reserve_size)
        found.forward = lambda *given, f=found: (f.made.append("forward"), x.relu(), weight, bias, None)[1:]
        assert joined.training(*call)[3].numel() == size
        assert found.made == made
    call[5] = None
    found = plans(1)
    assert joined.training(*call)[3].numel() == 0
    assert found.made == []


def test_backward_never_reads_a_reserve_that_nobody_wrote(torch, joined, plans, device, monkeypatch):
    """Plans that forward was refused for want of memory, say, may be had by the time of backward."""
    x, z = (drawn(torch, device, *SHAPE, seed=n).requires_grad_() for n in range(2))
    weight, bias, *_ = vectors(torch, device)
    found, asked = plans(16), []
    monkeypatch.setattr(joined.fused, "_plans_of", lambda *question, known: asked.append(question))
    y = joined.batch_norm_relu(x, None, None, weight, bias, z, 0.1, 1e-5, False, False)
    assert len(asked) == 1
    monkeypatch.setattr(joined.fused, "_plans_of", lambda *question, known: found)
    y.sum().backward()
    assert found.made == []
    assert torch.equal(z.grad, (y > 0).float())


def test_both_directions_ask_the_same(torch, joined, plans, device, monkeypatch):
    """Whatever PyTorch's switch says when, and wherever dy and the residual are."""
    x, z, dy = (drawn(torch, device, *SHAPE, seed=n).requires_grad_(n < 2) for n in range(3))
    weight, bias, *_ = vectors(torch, device)
    found, asked = plans(16), []

    def question(x, *options, known):
        asked.append((x.dtype, x.shape, x.stride(), *options, known))
        return found

    monkeypatch.setattr(joined.fused, "_plans_of", question)
    y = joined.batch_norm_relu(x, None, None, weight, bias, odd(torch, z), 0.1, 1e-5, False, False)
    torch.use_deterministic_algorithms(True)
    try:
        y.backward(odd(torch, dy.contiguous()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [(x.dtype, x.shape, x.stride(), True, True, False, 0.1, 1e-5, True, True)] * 2


def test_plans_that_must_be_known_while_a_graph_is_captured(torch, joined, device, monkeypatch):
    if torch.version.hip is not None:
        pytest.skip("MIOpen has no fused plans for training")
    x = drawn(torch, device, 3, 16, 2, 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(joined.fused, "_data", lambda x: True)
    question = x, True, True, False, 0.123, 1e-5, True
    assert joined.fused._plans_of(*question) is None
    with pytest.raises(pybnorm.ArgumentError, match="the first call of its kind while a graph is captured"):
        joined.fused._plans_of(*question, known=True)


def test_compilers_see_whether_plans_fit(torch, joined, device, monkeypatch):
    """They have no addresses: a question for one would end a graph that must be whole."""
    monkeypatch.setattr(joined.fused, "_data", lambda x: True)
    x, vector = drawn(torch, device, *SHAPE), drawn(torch, device, SHAPE[1])
    call = torch.compile(
        lambda x, vector: x + 1 if joined.fused.fits(x, (vector,)) else x, backend="eager", fullgraph=True
    )
    assert torch.equal(call(x, vector), x + 1)
    assert torch.equal(call(x, vector.half()), x)
