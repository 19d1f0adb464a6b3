"""MIOpen's plain calls and those of _V2 give the same bits: the library as it is, and a copy that hides the latter.

The copy is the vendor's own file with three entries of its table of symbols marked as hidden, so that the loader does
not give them out, while the library's calls of itself go on.
"""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from v2_worker import NAMES

import pybnorm

WORKER = Path(__file__).with_name("v2_worker.py")
DYNSYM = 11


def hide(file, names):
    """Mark dynamic symbols of an ELF file (64 bits, little-endian) as hidden."""
    raw = bytearray(Path(file).read_bytes())
    assert raw[:6] == b"\x7fELF\x02\x01", file
    (table,) = struct.unpack_from("<Q", raw, 0x28)
    size, count = struct.unpack_from("<HH", raw, 0x3A)
    # type, offset, size, link of each section
    sections = [struct.unpack_from("<4xI16xQQI", raw, table + i * size) for i in range(count)]
    _, start, length, link = next(s for s in sections if s[0] == DYNSYM)
    strings = sections[link][1]
    hidden = set()
    for symbol in range(start, start + length, 24):
        (offset,) = struct.unpack_from("<I", raw, symbol)
        name = raw[strings + offset : raw.index(b"\0", strings + offset)].decode()
        if name in names:
            raw[symbol + 5] = 2  # STV_HIDDEN
            hidden.add(name)
    assert hidden == set(names)
    return raw


def run(library):
    environment = os.environ | {"PYBNORM_LIB_MIOPEN": str(library)}
    done = subprocess.run([sys.executable, str(WORKER)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_plain_and_v2_calls_give_the_same_bits(handle, tmp_path):
    if not all(pybnorm.has_symbol(handle.backend, name) for name in NAMES):
        pytest.skip(f"{handle.backend}: no _V2 calls")
    path = handle.library.path
    copy = tmp_path / Path(path).name
    copy.write_bytes(hide(path, NAMES))
    with_v2, without = run(path), run(copy)
    assert (with_v2["v2"], without["v2"]) == ([True] * 3, [False] * 3)
    # In three dtypes NCHW in two modes and NHWC in one, until 3.4 without inference; with and without saved statistics.
    assert len(with_v2["digests"]) == 3 * (2 * 5 + (5 if handle.library.version >= (3, 5) else 4))
    assert with_v2["digests"] == without["digests"]
    assert len(set(with_v2["digests"].values())) > 20  # some are the same in both layouts
