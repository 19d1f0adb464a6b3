"""Batch norm over the data of all ranks, uneven batches included. ``mpiexec -n 2 python examples/call_sync.py``"""

import numpy as np
from mpi4py import MPI

import pybnorm
from pybnorm.sync import SyncBatchNorm

world = MPI.COMM_WORLD
whole = np.random.default_rng(0).normal(3, 2, (9, 16, 14, 14)).astype(np.float32)
first = len(whole) * world.rank // world.size
x = whole[first : len(whole) * (world.rank + 1) // world.size]
y, (scale, bias, mean, inv_variance) = np.empty_like(x), np.ones((4, 16), np.float32)

with pybnorm.Handle("onednn") as handle:
    norm = SyncBatchNorm(handle, world, 16)
    count = norm.forward(x, scale, bias, y, saved_mean=mean, saved_inv_variance=inv_variance)
    dx, (dscale, dbias) = np.empty_like(x), np.empty((2, 16), np.float32)
    norm.backward(x, y, scale, dx, dscale, dbias, saved_mean=mean, saved_inv_variance=inv_variance)

right = pybnorm.functional.batch_norm_training(whole, scale, bias)
difference = np.abs(y - right[0][first : first + len(x)]).max()
line = f"rank {world.rank}: {len(x)} of {len(whole)} images, {count} values per channel; "
line += f"from the whole batch on one device y differs by {difference:.0e}\n"
print(line, end="", flush=True)  # in one piece: ranks print at the same time
