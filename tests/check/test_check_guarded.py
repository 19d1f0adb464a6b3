"""What a kernel reads or writes outside of its arrays shows in the verdict."""

import ctypes

import numpy as np
import pytest

from pybnorm import _arguments, devices
from pybnorm.check import guarded
from pybnorm.check.bounds import Status
from pybnorm.check.problem import Problem
from pybnorm.check.runner import Session, run_case
from pybnorm.check.selftest.simulated import Kernels, array_of


class Reads(Kernels):
    """Adds elements to the last sum that do not belong to the array `name`: `count` behind it, or a stride's gap."""

    def __init__(self, name, count, gap=False):
        super().__init__()
        self.name, self.count, self.gap, self.outside = name, count, gap, None

    def look(self, buffer):
        values = array_of(buffer)
        place = buffer.strides[0] - self.count if self.gap else _arguments.span(buffer.dims, buffer.strides)
        memory = (ctypes.c_char * (self.count * values.itemsize)).from_address(buffer.pointer + place * values.itemsize)
        self.outside = np.frombuffer(memory, values.dtype).astype(np.float64).copy()

    def sum(self, values, short):
        total = super().sum(values, short)
        total[-1] += values.dtype.type(self.outside.sum())
        return total

    def forward_training(self, x, *arguments, **options):
        self.look(x)
        super().forward_training(x, *arguments, **options)

    def backward(self, x, dy, *arguments, **options):
        self.look({"x": x, "dy": dy}[self.name])
        super().backward(x, dy, *arguments, **options)


def result_of(line, kernel):
    return run_case(Problem.parse(line), Session("onednn", kernel, devices.device_for(1)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("line", "name", "gap"),
    [
        ("train,spatial,{},nchw,2x3x4x5,fill=randn", "x", False),
        ("backward,spatial,{},nchw,2x3x4x5,fill=randn", "dy", False),
        ("backward,spatial,{},nhwc,2x3x4x5,fill=exact", "x", False),
        ("train,spatial,{},strides=300x90x18x3,2x3x4x5,fill=randn", "x", True),
    ],
)
def test_a_read_outside_of_an_input_makes_a_nan(dtype, count, line, name, gap):
    result = result_of(line.format(dtype), Reads(name, count, gap))
    assert result.status == Status.FAIL
    assert any("spread" in v.note for v in result.verdicts)


def test_a_pattern_that_is_a_small_number_would_hide_it(monkeypatch):
    """What the guards of inputs were: -4.7e-15 in float32 is lost in any sum."""
    monkeypatch.setattr(guarded, "POISON", guarded.PATTERN)
    assert result_of("train,spatial,f32,nchw,2x3x4x5,fill=randn", Reads("x", 3)).status == Status.PASS


def test_guards_are_nan_around_what_is_read_and_a_pattern_around_what_is_written():
    seen = {}

    class Looking(Kernels):
        def forward_training(self, x, scale, bias, y, **options):
            for name, buffer in {"x": x, "scale": scale, "bias": bias, "y": y, **options}.items():
                if hasattr(buffer, "pointer"):
                    size = _arguments.span(buffer.dims, buffer.strides) * buffer.dtype.itemsize
                    ends = buffer.pointer - 8, buffer.pointer + size
                    seen[name] = {bytes((ctypes.c_char * 8).from_address(end)) for end in ends}
            super().forward_training(x, scale, bias, y, **options)

    result_of("train,spatial,bf16,nchw,2x3x4x5", Looking())
    read = {"x", "scale", "bias", "running_mean", "running_variance"}
    assert {name for name, ends in seen.items() if ends == {b"\xff" * 8}} == read
    assert {name for name, ends in seen.items() if ends == {b"\xa7" * 8}} == {"y", "saved_mean", "saved_inv_variance"}
