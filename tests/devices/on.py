"""A device of MIOpen's, a handle on a stream of its own, and cases there."""

import numpy as np
from test_calls import Case

import pybnorm
from pybnorm import devices
from pybnorm._arrays import ROCM
from pybnorm.check.language.problem import Problem

WORDS = ("train", "infer", "backward")


class On:
    def __init__(self, ordinal=0):
        self.ordinal, self.device = ordinal, devices.device_for(ROCM, ordinal)
        self.handle = pybnorm.Handle("miopen", stream=self.device.stream)
        assert self.handle.device == ordinal

    def case(self, word="train"):
        """Of repeated calls each gives the same: no running statistics."""
        options = ",running=0" if word == "train" else ""
        line = f"{word},spatial,f32,nchw,4x3x5x6,fill=randn,seed={self.ordinal}{options}"
        return Case(self.handle, Problem.parse(line), device=self.device)

    def empty(self, shape=(4, 3, 5, 6)):
        return self.device.from_numpy(np.full(shape, np.nan, np.float32))
