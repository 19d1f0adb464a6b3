"""Inputs depend on the line alone, and the exact fill is exact."""

import dataclasses
import hashlib
import math
import pathlib
import statistics
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest
from click.testing import CliRunner
from tables import table

from pybnorm.check.judging.bounds import Status
from pybnorm.check.language import data, fills, generator
from pybnorm.check.language.data import generate, sums_are_exact
from pybnorm.check.language.generator import normal, splitmix64, uniform
from pybnorm.check.language.problem import FILLS, Problem
from pybnorm.check.run.runner import run_case
from pybnorm.check.selftest.simulated import session
from pybnorm.cli import main
from pybnorm.enums import Mode, Operation
from pybnorm.errors import ArgumentError
from pybnorm.reference import threads

ONE_SIGN = ("relu", "image", "sparse", "level")
LINES = [
    "train,spatial,f32,nchw,4x9x3x4",
    "train,peract,bf16,nchw,8x3x2x2,fill=randn,kappa=3,beta=0.5",
    "backward,spatial,f16,nchw,5x3x3x3,beta_param=1,beta=1",
    "backward,spatial,f64,nchw,2x4x7,fill=randn,seed=5",
    "infer,spatial,f32,nchw,3x5x2x2",
    "infer,spatial,f64,nchw,3x5x2x2,fill=randn,kappa=100",
    *(
        line + fill
        for fill in ("sqrteps", "ramp", "constant", "range", "paired", "special", *ONE_SIGN)
        for line in (
            "train,spatial,f32,nchw,4x9x3x4,fill=",
            "backward,peract,bf16,nchw,5x3x2x2,beta=1,beta_param=1,seed=2,fill=",
            "infer,spatial,f16,nchw,3x5x2x2,beta=1,fill=",
            "backward,spatial,f64,nchw,2x4x7,seed=5,fill=",
        )
    ),
    "train,spatial,f32,nchw,4x9x3x4,fill=sqrteps,kappa=3,eps=0.001",
    "train,spatial,f32,nchw,4x9x3x4,fill=constant,magnitude=100",
    "infer,spatial,f32,nchw,4x9x3x4,fill=range,magnitude=1e+30",
    "train,spatial,f16,nchw,4x9x3x4,fill=randn,params=f16",
    "backward,spatial,bf16,nchw,4x9x3x4,fill=randn,kappa=3",
    "backward,spatial,f32,nchw,4x9x3x4,fill=randn,scale=zero,sign=negative",
    "train,spatial,f32,nchw,4x9x3x4,fill=randn,scale=small",
    "train,spatial,f32,nchw,4x9x3x4,fill=randn,factor=1,old=nan",
]
DIGESTS = """
    611b 0d39 7867 9c6d 585f 03c0 4864 c1fb ec95 7261 2c2d e26c 77eb c5d0 2603 5a3d d174 7392 de32 5d51
    5581 e5d4 8c25 1bbf 5af9 f517 ea24 9a91 79cc 79ef df53 b49e ad6a 27c0 30b8 e50f 36b5 788d d243 67b9
    2db5 7ef3 4d8b 731e 404c e2fa 0d41 c899 b3c7 3d7f 84d6 e806 d34c ba90
"""


def digest(line):
    h = hashlib.sha256()
    for name, array in generate(Problem.parse(line)).arrays().items():
        h.update(name.encode())
        # a NaN's payload is no part of the contract
        h.update(np.where(np.isnan(array), 0, array).astype(array.dtype).tobytes())
    return h.hexdigest()[:4]


@table(("line", "expected"), list(zip(LINES, DIGESTS.split(), strict=True)))
def test_inputs_are_the_same_on_every_machine(line, expected):
    assert digest(line) == expected


def test_splitmix64_is_the_published_generator():
    """The recurrence of Vigna's splitmix64.c, entered at a state that hashes seed and stream."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def word(state):
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    assert [word(golden), word(2 * golden & mask)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # the known first words
    start = word(word((7 + golden) & mask) ^ (3 * golden & mask))
    assert [int(w) for w in splitmix64(7, 3, 5)] == [word((start + i * golden) & mask) for i in range(1, 6)]
    streams = [int(w) for seed in (0, 1) for stream in (1, 2) for w in splitmix64(seed, stream, 8)]
    assert len(set(streams)) == 32


def test_normal_is_the_inverse_of_the_normal_distribution():
    words = splitmix64(3, 1, 20000)
    words[:2] = [0, 2**64 - 1]
    exact = [statistics.NormalDist().inv_cdf(p) for p in uniform(words)]
    np.testing.assert_allclose(normal(words), exact, rtol=2e-7, atol=2e-7)
    assert normal(words)[0] == -normal(words)[1]
    assert abs(normal(words).mean()) < 0.03
    assert abs(normal(words).std() - 1) < 0.03


def test_values_do_not_depend_on_the_layout():
    first, last = (
        generate(Problem.parse(f"train,spatial,f32,{layout},3x4x5x6,fill=randn")) for layout in ("nchw", "nhwc")
    )
    for name, array in first.arrays().items():
        assert array.tobytes() == getattr(last, name).tobytes()


@table("dtype", ["f32", "bf16", "f16", "f64"])
@table(
    ("mode", "dims", "variance", "inverse"),
    [
        ("spatial", "8x11x3x4", 3 / 16, 2.0),
        ("spatial", "2x9x3x3", 1 / 4, 1.0),
        ("spatial", "3x9x3x3", 26 / 27 / 4, None),
        ("peract", "16x3x2x3", 3 / 16, 2.0),
        ("peract", "6x3x2x3", 1 / 4, 1.0),
        ("peract", "5x3x2x3", 1 / 5, None),
    ],
)
def test_the_exact_fill_has_the_variance_it_promises(dtype, mode, dims, variance, inverse):
    problem = Problem.parse(f"train,{mode},{dtype},nchw,{dims}")
    x = generate(problem).x.astype(np.float64)
    assert sums_are_exact(problem)
    axes = problem.reduced_axes
    mean = x.mean(axis=axes, keepdims=True)
    means = {0, 0.5, -0.5, 1, -1, 1.5, 2, -2}
    assert len(set(np.round(mean.ravel(), 9))) > 4
    assert all(min(abs(v - known) for known in means) < 1e-12 for v in mean.ravel())
    np.testing.assert_allclose(x.var(axis=axes), variance, rtol=1e-12)
    if inverse is not None:
        assert 1 / math.sqrt(variance + problem.epsilon) == inverse
        # no order of float32 additions rounds: forwards, backwards and blocked agree to the bit with the true sums
        rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1) if mode == "spatial" else x.reshape(len(x), -1).T
        for order in (rows, rows[:, ::-1]):
            chain = np.add.accumulate(order.astype(np.float32), axis=1)[:, -1]
            squares = np.add.accumulate(order.astype(np.float32) ** 2, axis=1)[:, -1]
            assert [float(v) for v in chain] == [math.fsum(row) for row in rows]
            assert [float(v) for v in squares] == [math.fsum(row**2) for row in rows]


@table(
    ("line", "exact"),
    [
        ("f32,nchw,64x1x101x101", True),
        ("f32,nchw,64x9x511x512", True),
        ("f32,nchw,64x9x512x512", False),
        ("f64,nchw,64x9x512x512", True),
        ("f32,nchw,8x1,eps=1e-05", False),
        ("f32,nchw,8x1,fill=randn", False),
        ("f32,nchw,64x1x255x256,fill=paired", True),
        ("f32,nchw,64x1x256x256,fill=paired", False),
        ("f32,nchw,8x1x2x2,fill=paired,eps=1e-05", False),
    ],
)
def test_exactness_ends_where_float32_ends(line, exact):
    assert sums_are_exact(Problem.parse(f"train,spatial,{line}")) is exact


@table("line", LINES)
def test_a_prior_is_poison_exactly_where_beta_is_zero(line):
    problem = Problem.parse(line)
    inputs = generate(problem)
    assert np.isnan(inputs.prior).all() == (problem.beta == 0)
    if problem.operation == Operation.BACKWARD:
        assert np.isnan(inputs.prior_scale).all() == (problem.beta_param == 0)
        assert np.isnan(inputs.prior_bias).all() == (problem.beta_param == 0)


# ---------------------------------------------------------------- chunks


@table("line", LINES)
def test_chunks_do_not_show(line, monkeypatch):
    whole = digest(line)
    for size in (7, 50):
        monkeypatch.setattr(fills, "CHUNK", size)
        assert digest(line) == whole


@pytest.mark.slow
@pytest.mark.parametrize("fill", FILLS)
def test_generating_needs_little_more_memory_than_the_arrays(fill):
    """2 Mi elements: 8 MiB for each stored array; float64 copies of x would be 16 MiB each."""
    problem = Problem.parse(f"backward,spatial,f32,nchw,16x64x32x64,fill={fill},beta=1")
    tracemalloc.start()
    inputs = generate(problem)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - sum(a.nbytes for a in inputs.arrays().values()) < 12 * 2**20


@pytest.mark.parametrize("fill", ["exact", "randn"])
def test_threads_change_no_bit(fill, monkeypatch):
    """A large array is made by as many as there are, each value by its number alone."""
    problem = Problem.parse(f"backward,spatial,f32,nchw,8x33x64x64,fill={fill},beta=1")
    assert math.prod(problem.dims) >= threads.LARGE
    made, seen, round_to = [], set(), fills.round_to

    def rounded(values, dtype):
        if values.size == generator.CHUNK:
            seen.add(threading.current_thread() is threading.main_thread())
        return round_to(values, dtype)

    monkeypatch.setattr(fills, "round_to", rounded)
    for count in (1, 3):
        seen.clear()
        monkeypatch.setattr(threads, "threads", lambda count=count: count)
        made.append({name: a.tobytes() for name, a in generate(problem).arrays().items()})
        assert seen == {count == 1}
    assert made[0] == made[1]


def test_threads_are_those_of_the_process(monkeypatch):
    """A worker beside others is told its share by OMP_NUM_THREADS."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for given, right in (("", 4), ("2", 2), ("16", 4), ("0", 1), ("2,1", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert threads.threads() == right


@pytest.mark.slow
@pytest.mark.parametrize("different", [3, 1000, 2**20])
def test_the_order_of_long_rows_is_the_stable_one(different):
    """Keys that agree in the bits that the radix sorts look at, and in all."""
    rng = np.random.default_rng(different)
    keys = rng.integers(0, different, (3, 5000), np.uint64) << np.uint64(32)
    keys |= rng.integers(0, 4, keys.shape, np.uint64)
    order = np.argsort(keys, axis=1, kind="stable")
    assert (generator.order(keys) == order).all()


# ---------------------------------------------------------------- the fills


def rows_of(problem, array):
    """Elements of each statistic, in logical order, as float64."""
    values = array.astype(np.float64)
    if problem.mode == Mode.PER_ACTIVATION:
        return values.reshape(len(values), -1).T
    return np.moveaxis(values, 1, 0).reshape(values.shape[1], -1)


@table("dtype", ["f32", "bf16", "f16", "f64"])
@table(
    ("mode", "dims"), [("spatial", "8x11x3x4"), ("spatial", "3x9x3x3"), ("peract", "5x3x7"), ("spatial", "64x2x99x99")]
)
def test_the_paired_fill_has_exact_sums(dtype, mode, dims):
    """In integers: no partial sum, of whatever terms in whatever order, has more digits than the compute type."""
    problem = Problem.parse(f"backward,{mode},{dtype},nchw,{dims},fill=paired")
    assert sums_are_exact(problem)
    inputs = generate(problem)
    digits = 53 if dtype == "f64" else 24
    half = fills.paired_size(problem) // 2
    x, dy = rows_of(problem, inputs.x) * half, rows_of(problem, inputs.dy)
    mean = inputs.saved_mean.astype(np.float64).reshape(-1, 1) * half
    for units in (x, dy, mean):
        assert (units == np.rint(units)).all()
    x, dy, mean = (a.astype(np.int64) for a in (x, dy, mean))
    m = problem.m
    assert (x.sum(axis=1) == m * mean[:, 0]).all()  # so the division by m is exact
    assert (x[:, 0 : m - m % 2 : 2] + x[:, 1::2] == 2 * mean).all()
    # every term at its largest, all of one sign
    for terms in (x, x * x, (x - mean) ** 2, dy, dy * x, dy * (x - mean)):
        assert m * int(np.abs(terms).max()) < 2**digits
    inverse = inputs.saved_inv_variance.astype(np.float64)
    assert (np.frexp(inverse)[0] == 0.5).all()  # powers of two
    deviations = len(np.unique(np.abs(x - mean)))
    assert deviations > 3 or m > 2**17 or half < 8
    # what is stored is what was meant, to the bit
    assert (x == rows_of(problem, data.round_to(inputs.x.astype(np.float64), problem.dtype)) * half).all()


SHAPE = "spatial,f64,nchw,64x4x32x32"


@pytest.mark.parametrize(
    ("options", "kappa", "deviation"),
    [
        *((f"randn,kappa={kappa}", kappa, None) for kappa in (0, 3, 100)),
        *((f"sqrteps,kappa=2,eps={epsilon}", 2, math.sqrt(epsilon)) for epsilon in (1e-5, 1e-3)),
        ("relu", None, None),
        ("image", None, None),
        ("sparse", None, None),
    ],
)
def test_a_fill_has_the_statistics_that_it_promises(options, kappa, deviation):
    """kappa is mean over deviation; every second channel's given statistics are those of the fill."""
    problem = Problem.parse(f"backward,{SHAPE},fill={options}")
    inputs = generate(problem)
    rows = rows_of(problem, inputs.x)
    mean, scatter = rows.mean(axis=1), rows.std(axis=1)
    if kappa is not None:
        np.testing.assert_allclose(np.abs(mean) / scatter, kappa, rtol=0.05, atol=0.05)
    if deviation is not None:
        np.testing.assert_allclose(scatter, deviation, rtol=0.05)
    assert inputs.saved_mean.ravel()[::2] == pytest.approx(mean[::2], abs=0.05 * scatter.max())
    own = 1 / np.sqrt(scatter**2 + problem.epsilon)
    np.testing.assert_allclose(inputs.saved_inv_variance.ravel()[::2], own[::2], rtol=0.25)


PLACES = {
    "train": ("x", "scale", "bias", "mean", "variance"),
    "infer": ("x", "scale", "bias", "mean", "variance"),
    "backward": ("x", "dy", "scale", "saved_mean", "saved_inv_variance"),
    "train,running=0": ("x", "scale", "bias"),
    "backward,saved=0": ("x", "dy", "scale"),
}


@pytest.mark.parametrize("mode", ["spatial", "peract"])
@pytest.mark.parametrize("what", PLACES)
def test_the_special_fill_puts_one_value_into_one_statistic(mode, what):
    word, _, option = what.partition(",")
    for seed in range(18):
        tail = f",{option}" if option else ""
        problem = Problem.parse(f"{word},{mode},f16,nchw,5x4x3x3,fill=special,seed={seed}{tail}")
        inputs, plain = generate(problem), generate(dataclasses.replace(problem, fill="randn"))
        hit = PLACES[what][seed // 3 % len(PLACES[what])]
        for name, values in inputs.arrays().items():
            wrong = ~(values == getattr(plain, name)) & ~np.isnan(getattr(plain, name))
            assert np.count_nonzero(wrong) == (name == hit), (seed, name)
        values = getattr(inputs, hit)
        values = rows_of(problem, values) if hit in ("x", "dy") else values.reshape(-1, 1)
        channels, places = np.nonzero(~np.isfinite(values))
        assert channels.tolist() == [(len(values) - 1) // 2]
        np.testing.assert_equal(values[channels, places], [[math.nan, math.inf, -math.inf][seed % 3]])


# ---------------------------------------------------------------- a file's


def saved(folder, line, **changes):
    """The tensors of a line in an archive, by the names of the call's arguments; and its problem."""
    problem = Problem.parse(line)
    inputs = generate(problem)
    needed = {name: getattr(inputs, row[0]) for name, row in data.names(problem).items() if row[3]}
    path = folder / "tensors.npz"
    np.savez(path, **{name: a for name, a in (needed | changes).items() if a is not None})
    return inputs, dataclasses.replace(problem, fill="file", data=str(path))


@pytest.mark.parametrize(
    "line",
    [
        "train,spatial,f32,nchw,4x3x5x2,fill=randn,beta=0.5",
        "train,spatial,f16,nchw,4x3x5x2,fill=randn,running=0",
        "infer,peract,f64,nchw,4x3x5x2,fill=randn",
        "backward,spatial,f32,nhwc,4x3x5x2,fill=randn,beta_param=1",
        "backward,spatial,f32,nchw,4x3x5x2,fill=randn,saved=0,beta=2",
    ],
)
def test_a_file_gives_what_was_put_into_it(tmp_path, line):
    inputs, problem = saved(tmp_path, line)
    assert Problem.parse(str(problem)) == problem
    again = generate(problem).arrays()
    assert again.keys() == inputs.arrays().keys()
    for name, values in inputs.arrays().items():
        assert again[name].tobytes() == values.tobytes(), name


def test_a_file_may_have_other_types_and_shapes(tmp_path):
    line = "train,spatial,bf16,nchw,4x3x5x2,fill=randn"
    inputs = generate(Problem.parse(line))
    for x in (inputs.x.view(np.uint16), inputs.x, inputs.x.astype(np.float64)):
        _, problem = saved(tmp_path, line, x=x, scale=inputs.scale.ravel(), bias=[1, 2, 3])
        again = generate(problem)
        assert again.x.tobytes() == inputs.x.tobytes()
        assert again.bias.dtype == np.float32
        assert again.bias.ravel().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": None, "bias": None}, ("without x, bias", "x, scale, bias, y (or not), running_mean, running_variance")),
        ({"gamma": np.ones(3)}, ("with gamma", "for train")),
        ({"gamma": np.ones(3), "scale": None}, ("without scale", "(what is gamma there is scale here)")),
        (
            {"running_mean": None, "running_variance": None},
            ("(running=0 in the case is without running_mean and running_variance)",),
        ),
        ({"x": np.ones((4, 3, 5, 3))}, ("data: x", "4x3x5x3", "4x3x5x2, as the line says")),
        ({"scale": np.ones(4)}, ("data: scale", "1x3x1x1")),
        ({"scale": np.array(["a", "b", "c"])}, ("data: scale", "real numbers")),
        ({"x": np.ones((4, 3, 5, 2), np.complex64)}, ("data: x", "real numbers")),
    ],
)
def test_a_file_that_does_not_fit_says_why(tmp_path, changes, words):
    _, problem = saved(tmp_path, "train,spatial,f32,nchw,4x3x5x2,fill=randn", **changes)
    with pytest.raises(ArgumentError) as caught:
        generate(problem)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("flag", [1, 0x40])
def test_an_encrypted_archive_is_refused(tmp_path, flag):
    _, problem = saved(tmp_path, "infer,spatial,f32,nchw,2x3x2,fill=randn")
    path = pathlib.Path(problem.data)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= flag
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="a NumPy archive"):
        generate(problem)


def array_file(shape, dtype="<f4", body=b"", order="False"):
    """An array as NumPy writes it, whose header may say what it will."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def huge(archive):
    with archive.open("x.npy", "w", force_zip64=True) as stream:
        stream.write(array_file(f"({1 << 28},)"))
        for _ in range(256):
            stream.write(bytes(1 << 20))


LARGE_HEADER = b"\x93NUMPY\x02\x00" + (1 << 28).to_bytes(4, "little") + bytes(1 << 22)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("put", "words"),
    [
        (huge, "4x3x5x2, as the line says"),
        (lambda a: a.writestr("x.npy", array_file("(4, 3, 5, 2)", body=bytes(1 << 24))), "more or fewer bytes"),
        (lambda a: a.writestr("x.npy", array_file("(4, 3, 5, 2)", body=bytes(479))), "more or fewer bytes"),
        (lambda a: a.writestr("x.npy", array_file("(9223372036854775807, 9)")), "as the line says"),
        (lambda a: a.writestr("x.npy", array_file("(-4, -3, 5, 2)", body=bytes(480))), "as the line says"),
        (lambda a: a.writestr("x.npy", array_file("[" * 2000)), "a NumPy archive"),
        (lambda a: a.writestr("x.npy", array_file("(4, 3, 5, 2)", "|O")), "Python objects"),
        (lambda a: a.writestr("x.npy", array_file("(4, 3, 5, 2)", "<f99")), "a NumPy archive"),
        (lambda a: a.writestr("x.npy", array_file("(4, 3, 5, 2)", "<V1000000000")), "real numbers"),
        (lambda a: a.writestr("x.npy", LARGE_HEADER), "the header of x has"),
        (lambda a: a.writestr("x.npy", b"text"), "no array of NumPy"),
        (lambda a: a.writestr("notes.txt", b"text"), "is no array"),
        (lambda a: a.writestr("x.npy", array_file("(4, 3, 5, 2)"), zipfile.ZIP_BZIP2), "by another method"),
        (lambda a: [a.writestr(f"{i:0200}.npy", b"") for i in range(5000)], "its directory has more"),
    ],
)
def test_an_archive_of_a_stranger_takes_no_more_memory_than_its_line(tmp_path, put, words):
    """Sizes, kinds and methods are looked at before an array is unpacked."""
    _, problem = saved(tmp_path, "train,spatial,f32,nchw,4x3x5x2,fill=randn")
    with zipfile.ZipFile(problem.data) as old:
        members = {name: old.read(name) for name in old.namelist() if name != "x.npy"}
    with zipfile.ZipFile(problem.data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        put(archive)
    tracemalloc.start()
    try:
        with pytest.raises(ArgumentError, match=words):
            generate(problem)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_an_archive_with_every_byte_changed_is_read_or_refused(tmp_path):
    _, problem = saved(tmp_path, "infer,spatial,f32,nchw,2x3x2,fill=randn")
    path = pathlib.Path(problem.data)
    content, refused = path.read_bytes(), 0
    for i in range(len(content)):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        try:
            generate(problem)
        except ArgumentError as error:
            refused += "data" in str(error)
    for end in range(0, len(content), 7):
        path.write_bytes(content[:end])
        with pytest.raises(ArgumentError, match="data"):
            generate(problem)
    assert refused > len(content) // 2


def test_a_file_s_tensors_are_judged_like_others(tmp_path):
    _, problem = saved(tmp_path, "train,spatial,f32,nchw,8x3x5x4,fill=randn")
    assert not sums_are_exact(problem)
    assert run_case(problem, session()).status == Status.PASS
    assert run_case(problem, session(bug="epsilon 1e-3")).status == Status.FAIL
    assert run_case(dataclasses.replace(problem, data=str(tmp_path / "none.npz")), session()).status == Status.ERROR


def test_the_command_takes_a_file_and_prints_drawn_seeds(tmp_path):
    line = "train,spatial,f32,nchw,8x3x5x4,repeats=1"
    _, problem = saved(tmp_path, line)

    def run(*words):
        return CliRunner().invoke(main, ["check", "--list", *words])

    done = run("--case", line, "--data", problem.data)
    assert done.exit_code == 0, done.output
    assert f"fill=file,data={problem.data}" in done.output
    done = run("--case", "backward,spatial,f32,nchw,8x3x5x4", "--data", problem.data)
    assert done.exit_code == 2
    assert "without dy" in done.output
    done = run("--suite", "smoke", "--data", problem.data)
    assert done.exit_code == 2
    assert "with --case, which says what call the tensors are for" in done.output
