"""What oneDNN must run on this machine's processor."""

import pytest

import pybnorm
from pybnorm import DataType, Layout, Mode, Operation, _arguments
from pybnorm.check.support import features

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def onednn_must(dtype):
    """Whether oneDNN must execute batch norm of a dtype; None where a version of it may and another not."""
    dtype = _arguments.data_type(dtype)
    if dtype == DataType.BFLOAT16:
        return True if features() >= AVX512 else None
    return {DataType.FLOAT32: True, DataType.FLOAT16: None, DataType.FLOAT64: False}[dtype]


def need(backend, dtype):
    """Skip where the processor leaves oneDNN without a dtype; where it must have it, the test goes on, and fails."""
    dtype = _arguments.data_type(dtype)
    if backend == "onednn" and onednn_must(dtype) is None:
        layout = Layout.CHANNELS_FIRST
        if not pybnorm.capability("onednn", Operation.FORWARD_INFERENCE, Mode.SPATIAL, dtype, layout, 4)[0]:
            pytest.skip(f"onednn: no {dtype.short} on this processor")
