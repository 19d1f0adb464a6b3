"""PyTorch on the device that each backend computes on."""

import pytest


@pytest.fixture(scope="session")
def torch(need_package):
    """The package."""
    return need_package("torch")


@pytest.fixture(scope="session", params=["onednn", "cudnn", "miopen"])
def device(request, torch, need_device):
    """Name of PyTorch's device where a backend computes."""
    backend = request.param
    need_device(backend)
    if backend == "onednn":
        return "cpu"
    if not torch.cuda.is_available() or bool(getattr(torch.version, "hip", None)) != (backend == "miopen"):
        pytest.skip(f"{backend}: this PyTorch has no such GPU")
    return "cuda"


@pytest.fixture(scope="session")
def ours(torch):
    """The module under test, which imports PyTorch."""
    import pybnorm.torch

    return pybnorm.torch
