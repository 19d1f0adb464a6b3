"""The kernels that `pybnorm.torch.install` has for CUDA, over doubles of PyTorch's interface and of a library on CUDA.

The library is cuDNN's double in place of `native_cuda`, which has none: what is tested is the road to a plan.
"""

from pathlib import Path

import pytest

DOUBLE = Path(__file__).resolve().parents[1] / "doubles" / "torch.c"

SCRIPT = """
    import ctypes
    import torch
    import pybnorm, pybnorm.torch
    from pybnorm import _core, functional
    from pybnorm.torch import installation

    pybnorm.load("cudnn", values["cudnn"])
    double = ctypes.CDLL(values["torch"])
    cudnn = ctypes.CDLL(values["cudnn"])

    def number(name, kind=ctypes.c_int):
        return kind.in_dll(double, f"double_{name}")

    capturing, own, plans, copies = [False], [], [], []
    torch.cuda.is_current_stream_capturing = lambda: capturing[0]

    class Core:
        "The core, for which native_cuda is cuDNN."

        def __getattr__(self, name):
            return getattr(_core, name)

        def TensorDescriptor(self, backend, *given):
            return _core.TensorDescriptor("cudnn", *given)

    class Named:
        "A handle whose plans are of algorithms by name, of which training and backward want a workspace."

        def __init__(self, handle):
            self.handle = handle

        def __getattr__(self, name):
            by = {"algorithm": "spatial" if name == "plan_forward_inference" else "ex"}
            return lambda *given, **options: getattr(self.handle, name)(*given, **options, **by)

    real_handle = functional._default_handle
    functional._default_handle = lambda x, backend, there: Named(real_handle(x, "cudnn", there))
    installation._core = Core()
    both = ("native_batch_norm", "native_batch_norm_backward")
    pairs = [("CPU", name) for name in (*both, "cudnn_batch_norm", "cudnn_batch_norm_backward")]
    host = installation._Host(pairs)
    for name in both:
        host.kernels[name, True] = host.kernels.pop((name, False))
    real_own, real_plan = host.theirs, host.plan
    host.theirs = lambda name, *given: own.append(name) or real_own(name, *given)
    real_constant = host.constant
    host.constant = lambda *given: copies.append(given[-1]) or real_constant(*given[:-1], None)
    host.plan = lambda *given: plans.append(real_plan(*given)) or plans[-1]

    def data(shape, dtype):
        generator = torch.Generator().manual_seed(5)
        made = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        vectors = [torch.randn(shape[1], generator=generator) for _ in range(4)]
        return (*made, *vectors[:3], vectors[3].abs() + 0.5)

    def step(call, x, dy, weight, bias, mean, variance, training):
        x, weight, bias = (t if t is None else t.clone().requires_grad_() for t in (x, weight, bias))
        mean, variance = (t if t is None else t.clone() for t in (mean, variance))
        y = call(x, weight, bias, mean, variance, training, 0.1, 1e-3)[0]
        if training:
            y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": getattr(weight, "grad", None), "mean": mean, "var": variance}

    def worst(found, right):
        there = [name for name in right if right[name] is not None]
        return max(float((found[n].double() - right[n]).abs().max() / (1 + right[n].abs().max())) for n in there)

    found = {}
    natives, cudnns = torch.native_batch_norm, torch.cudnn_batch_norm
    cases = [(call, dtype, affine, running, training)
             for call in (natives, cudnns) for dtype in (torch.float32, torch.bfloat16)
             for affine in (True, False) for running in (True, False) for training in (True, False)
             if (running or training) and (affine or call is natives)]
    rights = []
    for call, dtype, affine, running, training in cases:
        x, dy, weight, bias, mean, variance = data((8, 32, 4, 4), dtype)
        given = (x, dy, *((weight, bias) if affine else (None, None)), *((mean, variance) if running else (None, None)))
        rights.append((given, step(natives, *(t if t is None else t.double() for t in given), training)))
    _core.install_torch_kernels(functional._local, host, pairs, (values["torch"], values["torch"]))
    errors = []
    for (call, dtype, *_, training), (given, right) in zip(cases, rights):
        error = worst(step(call, *given, training), right)
        errors.append(error / (2e-5 if dtype == torch.float32 else 2e-2))
    found["cases"], found["worst"], found["own"] = len(errors), max(errors), sorted(set(own))
    found["guards"] = number("guards").value
    found["made"] = number("made_guards").value > 0
    (handle,) = [handle for (name, index), handle in functional._local.handles.items() if name == "cudnn"]
    found["stream"] = handle.stream
    found["workspace"] = max([p.workspace_size for p in plans if p is not None])
    found["copies"] = sorted(set(copies))

    given = rights[0][0]
    number("stream", ctypes.c_uint64).value = 0x2000
    step(natives, *given, True)
    found["moved"] = handle.stream
    made = len(plans)

    other = data((8, 32, 4, 6), torch.float32)
    capturing[0] = True
    del own[:]
    step(natives, *given, True)
    warm = list(own)
    step(natives, *other, True)
    found["captured"] = [warm, list(own), [p is None for p in plans[made:]]]
    capturing[0] = False
    del own[:]
    step(natives, *other, True)
    found["later"] = list(own)
    first, second = (step(natives, *given, True) for _ in range(2))
    found["repeats"] = all(torch.equal(first[n], second[n]) for n in first)
    counts = [t._use_count() for t in given if t is not None]
    for _ in range(3):
        step(natives, *given, True), step(cudnns, *given, True)
    found["kept"] = [t._use_count() for t in given if t is not None] == counts

    _core.remove_torch_kernels()
    found["guards_after"] = number("guards").value
    report(found)
"""


def test_cudas_kernels(need_package, doubles, child, computing):
    torch = need_package("torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        pytest.skip(f"install() needs PyTorch 2.10, this is {torch.__version__}")
    if torch.version.cuda is not None:
        pytest.skip("a PyTorch with CUDA is tested on CUDA: tests/pytorch/test_installation.py")
    path = [Path(__file__).resolve().parents[2], Path(torch.__file__).resolve().parents[1]]
    library = doubles.plain("libpybnorm-torch-double.so", DOUBLE.read_text())
    found = child(SCRIPT, env={"PYTHONPATH": ":".join(map(str, path))}, torch=library, cudnn=computing)
    assert (found["cases"], found["own"]) == (18, [])
    assert found["worst"] < 1  # of what is allowed
    assert found["made"]
    assert (found["guards"], found["guards_after"]) == (0, 0)
    assert found["workspace"] > 0
    assert (found["stream"], found["moved"]) == (0x1000, 0x2000)
    assert found["copies"] == [0]
    both = ["native_batch_norm", "native_batch_norm_backward"]
    assert found["captured"] == [[], both, [True, True]]  # no plan can be made then, and none is kept
    assert found["later"] == []
    assert found["repeats"]
    assert found["kept"]
