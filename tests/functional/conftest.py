"""Frameworks with the device that each backend computes on."""

import pytest
from frameworks import FRAMEWORKS

PLACES = [("onednn", "numpy"), ("onednn", "torch"), ("onednn", "jax"), ("onednn", "dlpack"), ("cudnn", "torch"),
          ("cudnn", "cupy"), ("miopen", "torch"), ("miopen", "cupy"), ("miopen", "dlpack")]  # fmt: skip


@pytest.fixture(scope="session", params=PLACES, ids="-".join)
def frame(request, need_device, need_package):
    """A framework whose arrays are where the backend computes."""
    backend, name = request.param
    need_device(backend)
    package = None if name == "dlpack" else need_package(name)
    reason = FRAMEWORKS[name].absent(package, backend)
    if reason:
        pytest.skip(f"{backend}, {name}: {reason}")
    return FRAMEWORKS[name](package, backend)
