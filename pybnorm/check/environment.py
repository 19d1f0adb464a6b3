"""What of a process's surroundings can change what its library computes: the file, the processor, the variables."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

__all__ = ["VISIBLE", "cpu_flags", "file_digest", "variables", "visible"]

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Which devices a process sees: its own from process to process, and no other library."""
_OF_BACKEND = {
    "cudnn": ("CUDNN_", "NVIDIA_TF32_OVERRIDE", "CUDA_FORCE_", "CUDA_DISABLE_", "CUDA_MODULE_LOADING"),
    "miopen": ("MIOPEN_", "HSA_", "HIP_", "AMD_", "ROCM_"),
    "onednn": ("ONEDNN_", "DNNL_", "OMP_", "GOMP_", "KMP_"),
}
"""Beginnings of the names of variables that a backend's library, or what lies below it, reads."""
_FLAGS = (
    *("sse4_1", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "avx10", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "bf16", "sve", "sve2", "svebf16"),
)
_ENDS = 1 << 20


def variables(backend: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that matter to `backend`, `VISIBLE` left out; of this process by default."""
    known = os.environ if environment is None else environment
    beginnings = (*_OF_BACKEND.get(backend, ()), f"PYBNORM_LIB_{backend.upper()}")
    return {k: known[k] for k in sorted(known) if k.startswith(beginnings) and k not in VISIBLE}


def visible() -> str:
    """The devices that this process was given, as a shell would set them; empty if no variable says so."""
    return " ".join(f"{name}={os.environ[name]}" for name in VISIBLE if os.environ.get(name))


def cpu_flags(file: str = "/proc/cpuinfo") -> list[str]:
    """The instruction sets, of this processor's, that libraries choose their kernels by."""
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = (part.strip() for part in line.partition(":"))
                if name in ("flags", "Features"):  # x86, ARM; every further processor says the same
                    found = set(value.split())
                    return [flag for flag in _FLAGS if flag in found]
    except OSError:
        pass
    return []


def file_digest(path: str) -> str:
    """Which file it is, wherever it lies: a digest of its size, its first and its last MiB; empty if it cannot be read.

    Not of all of it, for a vendor's library may have a gigabyte; build ids and symbol tables lie at the ends.
    """
    state = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            state.update(size.to_bytes(8, "little"))
            state.update(stream.read(_ENDS))
            stream.seek(max(0, size - _ENDS))
            state.update(stream.read(_ENDS))
    except OSError:
        return ""
    return state.hexdigest()
