"""How kernels round what they store, to nearest and otherwise."""

import numpy as np

from selftest_tool.kernels import bf16, f32


def _neighbours(values, dtype):
    """The nearest 16-bit number, and the next one on the other side of the value, or itself where it is exact."""
    near = values.astype(dtype)
    wide = near.astype(f32)
    bits = near.view(np.uint16)
    further = np.where(np.abs(wide) > np.abs(values), bits - np.uint16(1), bits + np.uint16(1))
    exact = (wide == values) | ~np.isfinite(wide) | (wide == 0)
    return near, np.where(exact, bits, further).astype(np.uint16).view(dtype)


def _chosen(choose):
    """Between the two neighbours of a value, by their values; of 32-bit data nothing is changed."""

    def store(values, dtype):
        if dtype.itemsize != 2:
            return values.astype(dtype)
        near, other = _neighbours(values, dtype)
        with np.errstate(all="ignore"):
            takes = choose(values, near.astype(f32), other.astype(f32))
        return np.where(takes, other.view(np.uint16), near.view(np.uint16)).view(dtype)

    return store


ties_away = _chosen(lambda v, near, other: (np.abs(v - near) == np.abs(v - other)) & (np.abs(other) > np.abs(near)))
ties_to_zero = _chosen(lambda v, near, other: (np.abs(v - near) == np.abs(v - other)) & (np.abs(other) < np.abs(near)))
toward_zero = _chosen(lambda v, near, other: np.abs(other) < np.abs(near))
away_from_zero = _chosen(lambda v, near, other: np.abs(other) > np.abs(near))
upward = _chosen(lambda v, near, other: other > near)


def without_denormals(values, dtype):
    """To nearest; 16-bit results below the smallest normal number are 0."""
    stored = values.astype(dtype)
    tiny = f32(2.0**-14 if dtype == np.float16 else 2.0**-126)
    return np.where(np.abs(stored.astype(f32)) < tiny, dtype.type(0), stored)


def through_other(values, dtype):
    """16-bit results through the other 16-bit type."""
    if dtype.itemsize != 2:
        return values.astype(dtype)
    return values.astype(np.float16 if dtype == bf16 else bf16).astype(dtype)


def low_half(values, dtype):
    """The last bit of each 16-bit result is lost."""
    stored = values.astype(dtype)
    return (stored.view(np.uint16) & np.uint16(0xFFFE)).view(dtype) if dtype.itemsize == 2 else stored


def every_other(values, dtype):
    """Pairs of 16-bit results change places."""
    stored = values.astype(dtype)
    if dtype.itemsize == 2:
        whole = stored.shape[1] // 2 * 2
        stored[:, :whole] = stored[:, :whole].reshape(len(stored), -1, 2)[:, :, ::-1].reshape(len(stored), -1)
    return stored


def tf32(a):
    """Ten bits behind the point, rounded."""
    return ((a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(f32)


def twice_rounded(values, dtype):
    """16-bit results by way of tf32's ten bits behind the point."""
    return tf32(values).astype(dtype) if dtype == bf16 else values.astype(dtype)


def by_chance(values, dtype):
    """The last eighth of 16-bit results rounded up or down by chance."""
    stored = values.astype(dtype)
    if dtype.itemsize == 2:
        last = slice(-max(1, values.shape[1] // 8), None)
        dropped = np.uint32(16 if dtype == bf16 else 13)
        noise = np.random.default_rng(3).integers(0, 1 << int(dropped), values[:, last].shape, np.uint32)
        bits = (np.ascontiguousarray(values[:, last]).view(np.uint32) + noise) >> dropped << dropped
        stored[:, last] = bits.view(f32).astype(dtype)
    return stored
