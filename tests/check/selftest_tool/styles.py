"""Honest styles of batch norm kernels, as libraries and their authors compute: none may be accused."""

import numpy as np

from selftest_tool.kernels import Kernel, bf16, blocked, compensated, f32, lanes, pairwise, sequential, tree, wide
from selftest_tool.stores import ties_away, ties_to_zero, without_denormals


def _ulps(count):
    """A value that is off by up to so many units in the last place, now up, now down."""

    def change(value, rows):
        direction = np.where(np.arange(len(value))[:, None] % 3 == 0, f32(np.inf), f32(-np.inf))
        for _ in range(count):
            value = np.nextafter(value, direction)
        return value

    return change


def _flushed(value, rows):
    return np.where(np.abs(value) < np.finfo(f32).tiny, f32(0), value)


def _butterfly(a):
    """Each lane of 32 adds what it reads, then lanes exchange; warps of 1,024 terms in a tree."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % 1024))).reshape(len(a), -1, 32, 32)
    warps = np.add.accumulate(a, axis=2, dtype=f32)[:, :, -1]
    for step in (16, 8, 4, 2, 1):
        warps = warps + warps[:, :, np.arange(32) ^ step]
    return tree(warps[:, :, 0])


def _shuffled(a):
    """As atomic additions of 256 sums come, in any order."""
    sums = lanes(256)
    whole = np.pad(a, ((0, 0), (0, -a.shape[1] % 256))).reshape(len(a), -1, 256).swapaxes(1, 2)
    parts = sums(np.ascontiguousarray(whole).reshape(-1, whole.shape[2])).reshape(len(a), 256)
    return sequential(parts[:, np.random.default_rng(7).permutation(256)])


def _double_float(a):
    """Knuth's sum and its error, in 16 chains."""
    a = np.pad(a, ((0, 0), (0, -a.shape[1] % 16))).reshape(len(a), -1, 16)
    high, low = np.zeros_like(a[:, 0]), np.zeros_like(a[:, 0])
    for i in range(a.shape[1]):
        new = high + a[:, i]
        part = new - high
        low = low + ((high - (new - part)) + (a[:, i] - part))
        high = new
    return pairwise(np.concatenate([high, low], axis=1))


def _split(a):
    """Each term as the sum of three of eight bits, as matrix units take it."""
    left, total = a, np.zeros_like(a[:, :1])
    for _ in range(3):
        part = left.astype(bf16).astype(f32)
        total, left = total + blocked(64)(part), left - part
    return total + pairwise(left)


def _newton(variance, rows):
    value = variance + f32(rows.problem.epsilon)
    rough = np.float16 if bool(((value > 1e-8) & (value < 1e8)).all()) else f32
    near = (f32(1) / np.sqrt(value)).astype(rough).astype(f32)
    for _ in range(2):
        near = near * (f32(1.5) - f32(0.5) * value * near * near)
    return near


STYLES = {
    "two-pass, pairwise": Kernel(),
    "two-pass, sequential": Kernel(total=sequential),
    "4 lanes": Kernel(total=lanes(4)),
    "16 lanes": Kernel(total=lanes(16)),
    "64 lanes": Kernel(total=lanes(64)),
    "binary tree": Kernel(total=tree),
    "blocks of 256": Kernel(total=blocked(256)),
    "blocks of 1024 in sequence": Kernel(total=blocked(1024, sequential)),
    "float64 sums": Kernel(total=wide),
    "compensated sums": Kernel(total=compensated),
    "Welford, one chain": Kernel(chains=1),
    "Welford, 64 chains in a tree": Kernel(chains=64),
    "Welford, 256 chains one by one": Kernel(chains=-256),
    "Welford, 1024 chains in a tree": Kernel(chains=1024),
    "shifted by the first element": Kernel(shifted=1),
    "folded to a x + b": Kernel(folded=True),
    "multiplied by 1/m": Kernel(reciprocal=True),
    "fused multiply-add": Kernel(fused=True, total=lanes(16)),
    "rsqrt within 1 ulp": Kernel(after={"inverse": _ulps(1)}),
    "rsqrt within 2 ulp": Kernel(after={"inverse": _ulps(2)}),
    "flushes to zero": Kernel(after={n: _flushed for n in ("y", "dx", "dscale", "dbias", "mean", "variance")}),
    "16-bit stores, ties away from zero": Kernel(store=ties_away),
    "16-bit stores, ties to zero": Kernel(store=ties_to_zero),
    "16-bit stores without denormals": Kernel(store=without_denormals),
    "butterfly of 32 lanes, then warps in a tree": Kernel(total=_butterfly),
    "float32 in an order of chance": Kernel(total=_shuffled),
    "pairs of float32": Kernel(total=_double_float),
    "three bfloat16 parts": Kernel(total=_split),
    "Welford, 37 chains one by one": Kernel(chains=-37),
    "shifted by a mean of 64": Kernel(shifted=64),
    "rsqrt of 11 bits and two steps": Kernel(after={"of variance": _newton}),
    "fused a x + b": Kernel(folded=True, fused=True),
    "one pass": Kernel(one_pass=True, total=lanes(64)),
}
"""Right ways to compute; the last is right as far as its cancellation lets it be, and may be WARN."""
ONE_CHAIN = frozenset({"two-pass, sequential", "Welford, one chain"})
"""May be CHAIN where a sum is long."""
