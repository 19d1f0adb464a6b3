"""The packaged suites: they can be read, they cover what they say, and they stay within their budgets."""

import functools
import importlib.resources
import itertools
import math
import re

import pytest
from tables import table

from pybnorm.check.language import lines as language
from pybnorm.check.language.lines import packaged_suites
from pybnorm.check.language.problem import FILLS, OPERATIONS, OPTIONS, Problem
from pybnorm.enums import DataType, Layout, Mode, Operation

NETWORKS = (
    *("resnet18", "resnet50", "vgg16_bn", "mobilenet_v2", "densenet121"),
    *("googlenet", "inception_v3", "efficientnet_b0", "unet3d"),
)
ROWS = {"M": 29, "C": 22, "O": 8, "R": 12}
"""How many rows of each kind the collection of bugs has."""


load_suite = functools.cache(language.load_suite)


def text_of(name):
    return (importlib.resources.files("pybnorm.check.language") / "suites" / f"{name}.txt").read_text(encoding="utf-8")


def on_onednn(problem):
    """Whether oneDNN computes it: float32 and bfloat16, not persistent, the usual parameters, one stream."""
    return (
        problem.dtype in (DataType.FLOAT32, DataType.BFLOAT16)
        and problem.mode != Mode.SPATIAL_PERSISTENT
        and problem.parameter_dtype == problem.default_params
        and problem.streams == 1
    )


def data_bytes(problem):
    arrays = 3 if problem.operation == Operation.BACKWARD else 2
    return arrays * math.prod(problem.dims) * problem.dtype.itemsize


@table("name", packaged_suites())
def test_a_suite_is_read_and_its_lines_come_back(name):
    suite = load_suite(name)
    assert len(set(suite)) == len(suite)
    for problem in suite[:: 1 + len(suite) // 500]:
        assert Problem.parse(str(problem)) == problem
    assert text_of(name).startswith("# ")


@pytest.mark.slow
def test_includes():
    assert set(load_suite("networks")) == set().union(*(load_suite(name) for name in NETWORKS))
    full = set(load_suite("full"))
    for name in ("smoke", "standard", "edges", "bugs", "networks"):
        assert full > set(load_suite(name))
    assert {*load_suite("smoke"), *load_suite("product")} < set(load_suite("standard"))


@pytest.mark.slow
def test_the_standard_suite_has_1500_cases_that_a_backend_of_two_dtypes_computes_and_stays_small():
    suite = load_suite("standard")
    judged = [p for p in suite if on_onednn(p)]
    assert len(judged) >= 1500
    # float64 copies of x, dy, the result, the reference and the bounds stay far below the 2 GiB of the whole run
    assert max(math.prod(p.dims) for p in suite) <= 2**21
    assert sum(math.prod(p.dims) for p in judged) < 1.5e8


NOT_IN_STANDARD = {"data", "fence", "unbiased", "saved_as"}
FEW = {"magnitude", "params", "repeats", "streams"}
"""Options that an operation has other values of, not each dtype of it."""


def test_the_standard_suite_covers_every_combination():
    suite = load_suite("standard")
    for word, operation in OPERATIONS.items():
        options = set(OPTIONS[word]) - NOT_IN_STANDARD
        of_word = [p for p in suite if p.operation == operation]
        assert {o for o in options if len({getattr(p, o) for p in of_word}) < 2} == set(), operation
        for dtype in DataType:
            own = [p for p in of_word if p.dtype == dtype]
            assert {(p.fill, p.mode) for p in own} >= {
                (f, m) for f in FILLS for m in (Mode.SPATIAL, Mode.PER_ACTIVATION)
            }
            assert ({p.layout for p in own}, {p.mode for p in own}) == (set(Layout), set(Mode)), (operation, dtype)
            assert {len(p.dims) for p in own} >= {2, 3, 4, 5}, (operation, dtype)
            assert {o for o in options - FEW if len({getattr(p, o) for p in own}) < 2} == set(), (operation, dtype)
    assert {len(p.dims) for p in suite} == set(range(2, 9))
    remainders = {(p.m % 8 == 0, p.m % 2 == 0) for p in suite if p.fill == "exact"}
    assert remainders == {(True, True), (False, True), (False, False)}
    assert any(p.m <= 9 and p.fill == "randn" and p.kappa for p in suite)


def plane(problem):
    return math.prod(problem.dims[2:])


def test_the_edges_are_in_the_edges_suite():
    edges = load_suite("edges")
    train, backward = ([p for p in edges if p.word == word] for word in ("train", "backward"))
    lengths, planes = {1, 2, 7, 49, 127**2, 112 * 112 * 8}, {1, 196, 257, 361, 400, 512, 4096, 147**2}
    assert {p.m for p in train} >= lengths
    assert {p.m for p in backward} >= lengths
    assert {p.dims[0] for p in train} >= {768, 769, 1024, 1025, 65535, 65536, 131070, 131071}
    assert {p.dims[1] for p in train} >= {1, 2, 3, 33, 35, 65, 111, 257, 1024, 65536}
    assert {plane(p) for p in train} >= planes
    assert {plane(p) for p in backward if p.saved} >= planes
    assert {plane(p) for p in backward if not p.saved} >= {25, 4096, 5184, 5329, 400}
    assert {p.epsilon for p in train} >= {1e-7, 1e-5, 1e-3, 1 / 16}
    assert {p.kappa for p in train} >= {0, 3, 30, 100}
    assert {p.factor for p in train} >= {0, 0.1, 0.25, 1}


def test_every_row_of_the_bug_collection_is_a_case_or_has_a_reason():
    listed = set(re.findall(r"\b([MCOR]\d+)\b", text_of("bugs")))
    assert listed == {f"{kind}{i}" for kind, count in ROWS.items() for i in range(1, count + 1)}


def test_the_bugs_suite_is_for_a_laptop_and_the_big_one_has_the_sizes_reported():
    bugs, big = load_suite("bugs"), load_suite("bugs-big")
    assert max(data_bytes(p) for p in bugs) < 64 * 2**20
    assert not set(bugs) & set(big)
    assert {p.dims for p in big} >= {(38, 128, 80, 80), (16, 64, 147, 147), (256, 512, 28, 28), (1, 64, 128, 128, 128)}


def test_every_known_defect_is_a_case_of_the_bugs_suite():
    from pybnorm.defects import DEFECTS

    bugs = {*load_suite("bugs"), *(p for p in load_suite("bugs-big") if math.prod(p.dims) > 200_000)}
    assert not {d.id for d in DEFECTS if Problem.parse(d.case) not in bugs}


def test_the_large_suite_is_on_both_sides_of_31_bits():
    counts = {math.prod(p.dims) for p in load_suite("large")}
    assert any(2**31 - 2**21 < n < 2**31 for n in counts)
    assert any(2**31 < n < 2**31 + 2**21 for n in counts)
    assert 2**31 in counts


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_asked_for_every_operation_dtype_and_layout_of_frameworks(name):
    suite = [p for p in load_suite(name) if p.mode == Mode.SPATIAL]
    asked = itertools.product(
        OPERATIONS.values(),
        (DataType.FLOAT32, DataType.BFLOAT16, DataType.FLOAT16),
        (Layout.CHANNELS_FIRST, Layout.CHANNELS_LAST),
        {p.dims for p in load_suite(name)},
    )
    assert {(p.operation, p.dtype, p.layout, p.dims) for p in suite} == set(asked)
    assert max(math.prod(p.dims) for p in suite) < 8e6


def test_the_fence_suite_has_both_ends_and_every_alignment():
    suite = load_suite("fence")
    assert all(p.fence for p in suite)
    for operation in OPERATIONS.values():
        for dtype in (DataType.FLOAT32, DataType.BFLOAT16):
            own = [p for p in suite if p.operation == operation and p.dtype == dtype]
            assert {p.fence for p in own} == {"start", "end"}
            assert {p.misalign for p in own} >= set(range(16))
            assert {p.layout for p in own} == set(Layout)


def test_the_random_suite_draws_its_seeds():
    first, second = (language.load_suite("random") for _ in range(2))
    assert {str(p).partition(",seed=")[0] for p in first} == {str(p).partition(",seed=")[0] for p in second}
    assert not set(first) & set(second)
    assert "seed=random" in text_of("random")


def test_the_suite_of_shapes_has_every_size():
    suite = load_suite("shapes")
    dims = {problem.dims for problem in suite}
    assert {d[1] for d in dims} >= set(range(1, 131))
    assert {math.prod(d[2:]) for d in dims} >= {*range(1, 131), *(2**k + i for k in range(3, 13) for i in (-1, 0, 1))}
    assert {d[0] for d in dims} >= {*range(1, 10), 31, 32, 33, 63, 64, 65, 255, 256, 257, 65535, 65536, 65537}
    assert any(len(d) == 4 and len(set(d)) == 1 for d in dims)
    for divisor in (2, 4, 8):
        assert any(math.prod(d[1:]) % divisor for d in dims)
        assert any(math.prod(d[1:]) % (2 * divisor) == divisor for d in dims)
    assert {d[1] % 32 for d in dims if d[1] > 32} == set(range(32))
    assert len({(p.operation, p.dtype, p.layout) for p in suite}) == 3 * 4 * 2
    assert sum(math.prod(p.dims) for p in suite) < 6e6, "seconds"
    assert set(suite) <= set(load_suite("standard"))
