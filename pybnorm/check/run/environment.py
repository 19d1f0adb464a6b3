"""The machine and the process: everything outside a library that can change what it computes."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pybnorm import __version__, _core
from pybnorm.check.judging.results import host_digest, is_implementation

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The devices that a process sees. They differ from process to process and change no library's results."""
_FLAGS = (
    *("sse4_1", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "avx10", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "bf16", "sve", "sve2", "svebf16"),
)
_RECORDED = (
    *("PYBNORM_", "CUDNN_", "CUDA_VISIBLE", "NVIDIA_TF32_OVERRIDE", "MIOPEN_", "HIP_VISIBLE", "ROCR_VISIBLE", "HSA_"),
    *("ONEDNN_", "DNNL_", "OMP_"),
)
"""Beginnings of the names of variables that a run's document records."""
_FRAMEWORKS: tuple[str, ...] = (
    *("CUDA_", "CUDNN_", "CUPY_", "DNNL_", "JAX_", "MKL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "OPENBLAS_"),
    *("PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "XLA_"),
)
"""The same, of what an implementation may be made of."""
_DRIVERS = {
    "nvidia": ("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"),
    "amdgpu": ("/sys/module/amdgpu/version", r"(\S+)"),
    "rocm": ("/opt/rocm/.info/version", r"(\S+)"),
}


def machine() -> dict[str, Any]:
    """The machine and what can change a library's behaviour on it, for a run's document.

    The document is made to be attached to tickets, so it holds neither user nor host name: ``host`` is a digest of the
    name, equal for all runs of one machine. Libraries and devices are in `BackendInfo`, filled by their own processes.
    """
    return {
        "pybnorm": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "ml_dtypes": importlib.metadata.version("ml_dtypes"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": host_digest(platform.node()),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processors": os.cpu_count(),
        "processors_usable": len(os.sched_getaffinity(0)),
        "cpu": cpuinfo("model name", "cpu model") or platform.processor(),
        "cpu_flags": cpu_flags(),
        "drivers": _drivers(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_RECORDED)},
    }


def _drivers() -> dict[str, str]:
    """Versions of the GPUs' kernel drivers and of ROCm, read from files: no library is loaded here."""
    found = {}
    for name, (file, pattern) in _DRIVERS.items():
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as stream:
            if match := re.search(pattern, stream.read(4096)):
                found[name] = match[1]
    return found


def variables(backend: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that matter to `backend`, `VISIBLE` left out; of this process by default."""
    known, beginnings = os.environ if environment is None else environment, _FRAMEWORKS
    if not is_implementation(backend):
        beginnings = (*_core.search_spec(backend).variables, f"PYBNORM_LIB_{backend.upper()}")
    return {k: known[k] for k in sorted(known) if k.startswith(beginnings) and k not in VISIBLE}


def visible() -> str:
    """The devices that this process was given, as a shell would set them; empty if no variable says so."""
    return " ".join(f"{name}={os.environ[name]}" for name in VISIBLE if os.environ.get(name))


def cpuinfo(*names: str, file: str = "/proc/cpuinfo") -> str:
    """The first value that Linux gives for one of `names`; all processors have the same. Empty if there is none."""
    with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def cpu_flags(file: str = "/proc/cpuinfo") -> list[str]:
    """Instruction sets of the processor by which libraries choose their kernels."""
    found = set(cpuinfo("flags", "Features", file=file).split())  # as x86 and ARM call them
    return [flag for flag in _FLAGS if flag in found]
