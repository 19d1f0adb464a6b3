"""Shapes that `benchmarks.device` measures: named sets, random ones, and single shapes as text."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from pybnorm import _arguments
from pybnorm.errors import ArgumentError

__all__ = ["SHAPES", "drawn", "parse", "random_shapes", "shapes_of"]

SHAPES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    name: tuple(tuple(map(int, shape.split("x"))) for shape in shapes.split())
    for name, shapes in {
        "h200": "256x64x112x112 256x256x56x56 256x512x28x28 256x1024x14x14 256x2048x7x7 8x64x32x32 8x64x16x64x64",
        "resnet50": "64x64x112x112 64x64x56x56 64x256x56x56 64x128x28x28 64x512x28x28 64x256x14x14 64x1024x14x14 "
        "64x512x7x7 64x2048x7x7",
        "mobilenetv2": "64x32x112x112 64x96x112x112 64x144x56x56 64x192x28x28 64x384x14x14 64x960x7x7 64x1280x7x7",
        "unet3d": "2x32x128x128x128 2x64x64x64x64 2x128x32x32x32 2x256x16x16x16 2x320x8x8x8",
        "small": "32x64x56x56 32x256x14x14 32x512x7x7",
    }.items()
}
"""Named sets of shapes of x: those of the measurements on an H200, networks' layers at usual batches, and for a CPU."""
ALLOWED = " | ".join((*SHAPES, "random:COUNT[:SEED], both below 10000", "NxCxHxW"))
RANDOM = "random"
LEAST_ELEMENTS = 1 << 10
MOST_ELEMENTS = {True: 1 << 27, False: 1 << 24}
"""Of random shapes, on a GPU and on the CPU: 512 and 64 MiB of float32."""
_SEEDS = 10000
_MOST_CHANNELS, _MOST_IMAGES = 4096, 1024
_LONGEST = {2: 1, 3: 1 << 16, 4: 512, 5: 128}
"""By rank, of a spatial axis."""


def drawn(names: Sequence[str]) -> list[str]:
    """The names, with a seed drawn for each ``random:COUNT`` that has none."""
    return [f"{n}:{random.randrange(_SEEDS)}" if n.startswith(RANDOM) and n.count(":") == 1 else n for n in names]


def shapes_of(names: Sequence[str], *, gpu: bool) -> list[tuple[int, ...]]:
    """The shapes of names, each once.

    Raises
    ------
    ArgumentError
    """
    found: list[tuple[int, ...]] = []
    for name in names:
        kind, *numbers = name.split(":")
        if kind == RANDOM and len(numbers) == 2 and all(n.isascii() and n.isdigit() and len(n) < 5 for n in numbers):
            count, seed = map(int, numbers)
            found += random_shapes(count, seed, MOST_ELEMENTS[gpu])
        elif name not in SHAPES and not name[:1].isdigit():
            raise ArgumentError("shapes", name, ALLOWED)
        else:
            found += SHAPES[name] if name in SHAPES else (parse(name),)
    return list(dict.fromkeys(found))


def random_shapes(count: int, seed: int, most: int) -> list[tuple[int, ...]]:
    """Different shapes of rank 2 to 5, of `LEAST_ELEMENTS` to `most` elements.

    Elements, channels and spatial sizes are uniform in their logarithm; half of the channel counts are multiples of 8,
    half of the planes square, and the batch is what remains.
    """
    pick = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}

    def size(largest: int) -> int:
        return round(2 ** pick.uniform(0, math.log2(largest)))

    while len(found) < count:
        rank = pick.choice((2, 3, 4, 4, 4, 5))
        elements = 2 ** pick.uniform(math.log2(LEAST_ELEMENTS), math.log2(most))
        channels = size(_MOST_CHANNELS)
        if pick.random() < 0.5:
            channels = -(-channels // 8) * 8
        spatial = [size(_LONGEST[rank]) for _ in range(rank - 2)]
        if pick.random() < 0.5:
            spatial = spatial[:1] * len(spatial)
        images = round(elements / channels / math.prod(spatial))
        if 1 <= images <= _MOST_IMAGES and images * math.prod(spatial) > 1:
            found[(images, channels, *spatial)] = None
    return list(found)


def parse(text: str) -> tuple[int, ...]:
    """``"8x64x32x32"`` as dims.

    Raises
    ------
    ArgumentError
    """
    try:
        return _arguments.dims([int(part) for part in text.split("x")], "shapes")
    except ValueError:
        raise ArgumentError("shapes", text, "NxCxHxW, 2 to 8 integers with x between") from None
