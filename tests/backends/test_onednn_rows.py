"""oneDNN's algorithms "rows" and "folded": elementwise passes, and sums but of one thread, by its other primitives."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

import pybnorm
from pybnorm import Operation
from pybnorm.check import runner
from pybnorm.check.bounds import Status
from pybnorm.check.problem import Problem
from pybnorm.check.session import open_session

PLANS = {
    Operation.FORWARD_TRAINING: "plan_forward_training",
    Operation.FORWARD_INFERENCE: "plan_forward_inference",
    Operation.BACKWARD: "plan_backward",
}


@pytest.fixture(scope="module")
def session():
    opened = open_session("onednn")
    with opened.handle:
        yield opened


@pytest.fixture
def handle(session):
    return session.handle


@pytest.fixture(params=[1, 2])
def threads(request):
    """One sums in C; a piece is of a size for each: with many, only a large tensor has several."""
    openmp = ctypes.CDLL("libgomp.so.1")
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(request.param)
    yield request.param
    openmp.omp_set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("fill", ["randn", "exact", "sqrteps", "special", "randn,kappa=10"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("operation", ["train", "infer", "backward", "backward,saved=0", "train,alpha=2,beta=0.5"])
@pytest.mark.parametrize(
    "where",
    [
        "nchw,4x19x29x31,algorithm=rows",
        "nchw,3x19x9x11,algorithm=rows",  # rows that are no whole number of eight vectors, by layer normalization
        "nchw,37x19x3x5,algorithm=rows",  # short rows, several of them in each step
        "nchw,2x5x1x1031,algorithm=rows",  # of a prime number of elements, which have no segments
        "nchw,37x19x3x5,algorithm=folded",
        "nhwc,4x19x29x31,algorithm=folded",  # 3,596 rows: 112 times 32, and 12
    ],
)
def test_a_call_is_within_the_bound(session, where, operation, dtype, fill):
    word, _, options = operation.partition(",")
    layout, dims, algorithm = where.split(",")
    line = f"{word},spatial,{dtype},{layout},{dims},fill={fill},{algorithm},repeats=1,{options}".rstrip(",")
    result = runner.run_case(Problem.parse(line), session)
    assert result.status == Status.PASS, result


@pytest.mark.parametrize("fill", ["randn", "randn,kappa=10"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("operation", ["train", "backward", "backward,saved=0"])
@pytest.mark.parametrize(
    "where",
    [
        "nchw,3x3x260x260,algorithm=rows",  # rows longer than a piece, cut
        "nchw,2x5x257x263,algorithm=rows",  # of a prime number of elements in both directions, whole
        "nchw,7x53x38x41,algorithm=rows",
        "nchw,13x251x10x19,algorithm=rows",  # segments of rows
        "nchw,61x211x9x5,algorithm=rows",  # short rows, whole images a piece
        "nchw,61x211x9x5,algorithm=folded",
        "nhwc,13x19x51x47,algorithm=folded",
        "nhwc,2x1501x15x13,algorithm=folded",
        "nchw,5x1301x6x9,algorithm=rows",  # vectors of an image that would leave the cache: in blocks
        "nchw,2x70x61x63,algorithm=rows",  # blocks that are summed and computed in turn, the last of fewer channels
    ],
)
@pytest.mark.usefixtures("threads")
def test_a_large_call_in_pieces_is_within_the_bound(session, where, operation, dtype, fill):
    layout, dims, algorithm = where.split(",")
    word, _, options = operation.partition(",")
    line = f"{word},spatial,{dtype},{layout},{dims},fill={fill},{algorithm},repeats=1,{options}".rstrip(",")
    result = runner.run_case(Problem.parse(line), session)
    assert result.status == Status.PASS, result


@pytest.mark.parametrize(("algorithm", "last"), [("rows", False), ("folded", True)])
@pytest.mark.usefixtures("threads")
def test_no_product_of_all_elements_is_written(handle, algorithm, last):
    """In float32 it would be twice dx. Where OpenMP has no threads for sums in C (TBB, SYCL) it is."""
    x = np.zeros((3, 19, 120, 120), ml_dtypes.bfloat16)
    x = np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1) if last else x
    assert handle.plan_backward(x, algorithm=algorithm).workspace_size < x.nbytes


@pytest.mark.parametrize("operation", PLANS, ids=lambda o: o.name.lower())
def test_auto_takes_what_has_vector_kernels(handle, operation):
    def chosen(*dims, mode="spatial", last=False, algorithm="auto", dtype=np.float32):
        x = np.zeros(dims, dtype)
        x = np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1) if last else x
        plan = getattr(handle, PLANS[operation])(x, mode=mode, algorithm=algorithm)
        assert plan.reason
        return plan.algorithm

    assert chosen(2, 3, 16, 16) == chosen(2, 3, 4, 4, 8) == "rows"
    assert chosen(40, 19) == chosen(9, 19, 5, 7, last=True) == "folded"
    assert chosen(40, 16) == chosen(4, 16, 2, 7, last=True) == chosen(2, 3, 16, 16, mode="per_activation") == "plain"
    many = "folded" if operation == Operation.FORWARD_TRAINING else "plain"
    assert chosen(129, 16) == chosen(9, 16, 5, 7, last=True) == chosen(129, 3, 4, 4, mode="per_activation") == many
    assert chosen(640, 3, 2, 2) == ("rows" if operation == Operation.FORWARD_INFERENCE else "folded")
    few = "rows" if operation == Operation.FORWARD_INFERENCE else "plain"
    assert chosen(2, 8, 4, 4) == chosen(16, 3, 2, 2) == few
    assert chosen(2, 8, 8, 8) == "rows"
    backward, half = operation == Operation.BACKWARD, ml_dtypes.bfloat16
    assert chosen(20, 19, 14, 14) == chosen(300, 19, 14, 14) == ("folded" if backward else "rows")
    assert chosen(20, 190, 14, 14) == "rows"
    assert chosen(20, 64, 14, 14, dtype=half) == ("rows" if operation == Operation.FORWARD_INFERENCE else "folded")
    assert chosen(300, 19, 9, 32, dtype=half) == ("folded" if backward else "rows")
    assert chosen(20, 19, 40, 40, dtype=half) == chosen(100, 21, 11, 11, dtype=half) == "rows"
    assert chosen(300, 8, 14, 14, last=True) == ("plain" if operation == Operation.FORWARD_INFERENCE else "folded")
    assert chosen(70, 24) == ("plain" if backward else "folded")
    for dims, algorithm in (((2, 3), "rows"), ((1, 3, 5, 7), "folded")):
        with pytest.raises(pybnorm.UnsupportedError, match=r"channels-first|several images"):
            chosen(*dims, algorithm=algorithm)
    if operation == Operation.FORWARD_INFERENCE:
        with pytest.raises(pybnorm.UnsupportedError, match="for their statistics"):
            chosen(200, 3, 5, 7, algorithm="folded", mode="per_activation")


CHAINS = """\
train,spatial,f32,nhwc,32x64x28x28,fill=sparse
train,spatial,bf16,nhwc,32x64x28x28,fill=sparse
train,spatial,f16,nhwc,32x16x28x28,fill=image
train,spatial,f32,nhwc,8x16x56x56,fill=level,inplace=1
train,spatial,f32,nhwc,8x24x56x56,fill=level
train,spatial,f32,nchw,640x32,fill=level
train,spatial,f32,nchw,64x16x3x3,fill=level
train,spatial,f32,strides=204800x3200x56x1,8x16x56x56,fill=level
train,spatial,f32,strides=201x3,640x32,fill=level,alpha=2,beta=0.5
backward,spatial,f32,strides=56448x3528x63x1,8x16x56x56,fill=sparse,saved=0
backward,spatial,f32,nhwc,64x48x14x14,fill=level,saved=0
backward,spatial,bf16,nhwc,64x48x14x14,fill=level,saved=0
train,peract,f32,nchw,1280x4x1x2,fill=sparse
train,peract,f32,nhwc,640x3x2x5,fill=sparse,beta=0.5
train,peract,f32,nhwc,641x7,fill=sparse,inplace=1
train,peract,f16,nhwc,641x7x5x1,fill=image
train,peract,bf16,nchw,650x7x5x1,fill=image
backward,peract,f32,nhwc,640x3x2x5,fill=sparse,saved=0
backward,peract,bf16,nhwc,640x3x2x2,fill=level,saved=0
"""


@pytest.mark.parametrize("line", CHAINS.splitlines())
def test_auto_sums_in_short_chains(session, line):
    problem = Problem.parse(f"{line},repeats=1,algorithm=auto")
    result = runner.run_case(problem, session)
    assert result.status == Status.PASS, result
    assert "onednn-chained-sums" in {d.id for d in pybnorm.known_defects("onednn", problem)}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dims", [(130, 16), (1000, 24), (5001, 40), (331, 1001), (70001, 3), (129, 5, 3, 1)])
@pytest.mark.parametrize("mode", ["spatial", "peract"])
def test_statistics_of_any_matrix_are_right(session, mode, dims, threads):
    openmp = ctypes.CDLL("libgomp.so.1")
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(threads)
    try:
        for dtype in ("f32", "bf16"):
            for word in ("train", "backward"):
                shape = "x".join(map(str, dims))
                last = f"{word},{mode},{dtype},nhwc,{shape},fill=randn,kappa=10,saved={int(word == 'train')}"
                result = runner.run_case(Problem.parse(f"{last},algorithm=folded,repeats=1"), session)
                assert result.status == Status.PASS, result
    finally:
        openmp.omp_set_num_threads(before)


@pytest.mark.parametrize("operation", ["train", "infer", "backward"])
def test_rows_of_one_element_are_none(session, operation):
    """oneDNN 3.2 gives every channel the factor of the first there, and its reduction refuses."""
    one, two = (Problem.parse(f"{operation},spatial,f32,nchw,30x3x1x{s},fill=randn,algorithm=rows") for s in (1, 2))
    assert runner.run_case(one, session).status == Status.UNSUPPORTED
    assert runner.run_case(two, session).status == Status.PASS


@pytest.mark.parametrize("dims", [(3, 5, 9, 11), (7, 250, 10, 19)], ids=["whole", "pieces"])
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.0, 1e-25, 1e25])
@pytest.mark.parametrize("operation", PLANS, ids=lambda o: o.name.lower())
@pytest.mark.usefixtures("threads")
def test_any_scale_is_right(handle, operation, factor, dims):
    """Layer normalization multiplies by positive numbers of a middle size alone."""
    random = np.random.default_rng(3)
    x, dy = random.standard_normal((2, *dims)).astype(np.float32)
    scale = np.resize(np.float32([factor, 0.5, 1, 2, 3]), dims[1]).reshape(1, -1, 1, 1)
    bias, mean, ones = np.zeros_like(scale), x.mean((0, 2, 3), keepdims=True), np.ones_like(scale)
    if operation == Operation.BACKWARD:
        given = {"dy": dy, "dscale": bias.copy(), "dbias": bias.copy()}
    else:
        given = {"bias": bias, "running_mean": mean.copy(), "running_variance": ones.copy()}
    if operation != Operation.FORWARD_INFERENCE:
        given |= {"saved_mean": mean, "saved_inv_variance": ones}
    results = []
    for algorithm in ("plain", "rows"):
        plan = getattr(handle, PLANS[operation])(x, algorithm=algorithm)
        out = np.empty_like(x)
        plan(x=x, scale=scale, **given, **{"dx" if operation == Operation.BACKWARD else "y": out})
        results.append(out)
    size = np.abs(results[0]).max((0, 2, 3), keepdims=True)
    assert (np.abs(results[1] - results[0]) <= 1e-5 * size).all()


@pytest.mark.parametrize(("algorithm", "last"), [("rows", False), ("folded", False), ("folded", True)])
def test_an_infinity_and_a_nan_stay_in_their_channel(handle, algorithm, last):
    x = np.random.default_rng(1).standard_normal((20, 3, 5, 7)).astype(np.float32)
    x[0, 0, 0, 0], x[19, 1, 4, 6] = np.nan, np.inf
    x = np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1) if last else x
    scale, bias = np.ones((2, 1, 3, 1, 1), np.float32)
    y, mean, inv_variance = np.empty_like(x), np.empty_like(scale), np.empty_like(scale)
    plan = handle.plan_forward_training(x, algorithm=algorithm, running=False)
    plan(x=x, scale=scale, bias=bias, y=y, saved_mean=mean, saved_inv_variance=inv_variance)
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2]).all()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("operation", PLANS, ids=lambda o: o.name.lower())
def test_in_place_it_is_still_right(session, layout, operation):
    """The steps would read what they have written; then the entry point computes."""
    word = {"FORWARD_TRAINING": "train", "FORWARD_INFERENCE": "infer"}.get(operation.name, "backward")
    line = f"{word},spatial,f32,{layout},21x19x5x3,fill=randn,algorithm=folded,inplace=1"
    assert runner.run_case(Problem.parse(line), session).status == Status.PASS


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(1, 16, 8192, 8209), (8192 * 8209, 16), ((1 << 26) + 15, 16)])
def test_images_of_more_than_two_gibibytes_are_written_where_they_lie(handle, dims):
    """Kernels for channels side by side count the bytes of an image in 32 bits; the last is a prime number of rows."""
    last = (dims[0], *dims[2:], dims[1])
    x, y = (np.moveaxis(np.zeros(last, ml_dtypes.bfloat16), -1, 1) for _ in range(2))
    ends = [(0,) * len(last), tuple(size // 2 for size in last), tuple(size - 1 for size in last)]
    for at in ends:
        np.moveaxis(x, 1, -1)[at] = 3
    ones, zeros = np.ones((1, 16) + (1,) * (len(dims) - 2), np.float32), np.zeros(16, np.float32)
    plan = handle.plan_forward_inference(x, epsilon=0.0)
    plan(x, ones, zeros.reshape(ones.shape), zeros.reshape(ones.shape), ones, y)
    for at in ends:
        assert np.moveaxis(y, 1, -1)[at] == 3
    assert np.count_nonzero(np.moveaxis(y, 1, -1)[..., 15].view(np.uint16)) == 1
