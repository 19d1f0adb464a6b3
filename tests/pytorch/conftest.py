"""PyTorch on the device that each backend computes on."""

import warnings

import pytest


@pytest.fixture(scope="session")
def torch(need_package):
    """The package."""
    return need_package("torch")


@pytest.fixture(scope="session", params=["native", "native_cuda", "miopen"])
def device(request, torch, need_device):
    """Name of PyTorch's device where a backend computes."""
    backend = request.param
    need_device(backend)
    if backend == "native":
        return "cpu"
    if not torch.cuda.is_available() or bool(getattr(torch.version, "hip", None)) != (backend == "miopen"):
        pytest.skip(f"{backend}: this PyTorch has no such GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer ones have another name for it too
        torch.backends.cudnn.allow_tf32 = False  # rounds convolutions to 11 bits; two steps on, gradients differ by 0.1
    return "cuda"


@pytest.fixture(scope="session")
def ours(torch):
    """The module under test, which imports PyTorch."""
    import pybnorm.torch

    return pybnorm.torch


@pytest.fixture
def operators(torch, ours, tmp_path, monkeypatch):
    """The operators' namespace; nothing that another run has compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield torch.ops.pybnorm
    torch._dynamo.reset()


@pytest.fixture
def python(ours):
    """The operators as PyTorch before 2.10 has them: computed by functions, without kernels in C."""
    import pybnorm
    from pybnorm.torch import calls, installation

    with installation._lock:
        pybnorm._core.remove_torch_kernels()
        installation._registered.clear()
        calls.compiled = False
    yield
    installation._start()


@pytest.fixture
def anew():
    """Has PyTorch's dispatcher call what is asked for now, and does so once more when a test's doubles are gone."""
    import pybnorm
    from pybnorm.torch import installation

    def register():
        with installation._lock:
            pybnorm._core.remove_torch_kernels()
            installation._registered.clear()
            installation._register()

    yield register
    register()
