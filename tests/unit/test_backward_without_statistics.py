"""cuDNN's backward without saved statistics, which plans compute first, on a double that computes on the host."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

import pytest

from pybnorm import DataType
from pybnorm.check.problem import expand

SCRIPT = """
    generator = np.random.default_rng(11)
    STORED = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}

    class Case:
        "Arrays of one backward, and what its formulas make of them in float64."

        def __init__(self, shape, layout="nhwc", dtype="f32", offset=5.0, epsilon=1e-3, alpha=1, beta=0, edit=None):
            self.shape, self.layout, self.dtype, self.epsilon = tuple(shape), layout, dtype, epsilon
            self.axes, self.wide = (0, *range(2, len(shape))), tuple(
                shape[i] if i == 1 else 1 for i in range(len(shape)))
            self.x = self.data(generator.standard_normal(shape) + offset)
            self.dy = self.data(generator.standard_normal(shape))
            for channel, place, value in edit or []:
                where = (slice(None), channel) if place is None else (0, channel, *[0] * (len(shape) - 2))
                self.x[where] = float(value)
            self.old = generator.standard_normal(shape).astype(STORED[dtype]) if beta else np.nan
            self.dx = self.data(self.old)
            self.scale, self.dscale, self.dbias = (self.vector(generator.standard_normal(shape[1])) for _ in range(3))
            self.olds = self.dscale.astype("f8"), self.dbias.astype("f8")
            self.alpha, self.beta, self.options = alpha, beta, {}
            if (alpha, beta) != (1, 0):
                self.options = {"alpha": alpha, "beta": beta, "alpha_param": beta, "beta_param": alpha}

        def data(self, fill):
            axes = (0, len(self.shape) - 1, *range(1, len(self.shape) - 1))
            if self.layout == "nchw":
                return memory(self.shape, fill, STORED[self.dtype])
            array = memory((self.shape[0], *self.shape[2:], self.shape[1] + 2), 7, STORED[self.dtype])
            if self.layout == "nhwc":
                array = memory((*array.shape[:-1], self.shape[1]), np.nan, STORED[self.dtype])
            self.all = array  # of a slice of channels, the last time of dx
            array = array[..., : self.shape[1]].transpose(axes)
            array[...] = fill
            return array

        def vector(self, fill=np.nan):
            return memory((self.shape[1],), fill)

        def plan(self, handle, algorithm, saved=False):
            strides = [step // self.x.itemsize for step in self.x.strides]
            with pybnorm.TensorDescriptor("cudnn", self.dtype, self.shape, strides) as desc:
                return handle.plan_backward(
                    desc, algorithm=algorithm, epsilon=self.epsilon, saved=saved, **self.options)

        def run(self, plan, scale=None, workspace=None):
            "With a workspace of NaN of exactly the size that the plan says."
            space = memory((plan.workspace_size,), 0xff, np.uint8) if workspace is None else workspace
            arrays = self.x, self.dy, self.scale if scale is None else scale, self.dx, self.dscale, self.dbias
            self.dx[...], self.dscale[...], self.dbias[...] = self.old, *self.olds
            plan(*[a.ctypes.data for a in arrays], None, None, (space.ctypes.data, space.nbytes))
            return space

        def wanted(self):
            x, dy = self.x.astype("f8"), self.dy.astype("f8")
            count = x.size // self.shape[1]
            with np.errstate(all="ignore"):
                mean = x.mean(self.axes).reshape(self.wide)
                inverse = 1 / np.sqrt(np.mean((x - mean) ** 2, self.axes).reshape(self.wide) + self.epsilon)
                dscale, dbias = (dy * (x - mean) * inverse).sum(self.axes), dy.sum(self.axes)
                g = dy - (dbias.reshape(self.wide) + (x - mean) * inverse * dscale.reshape(self.wide)) / count
                dx = self.scale.astype("f8").reshape(self.wide) * inverse * g
            if self.options:
                dx = self.alpha * dx + self.beta * self.old.astype("f8")
                dscale, dbias = (self.beta * new + self.alpha * old for new, old in zip((dscale, dbias), self.olds))
            return {"dx": dx, "dscale": dscale, "dbias": dbias}

        def errors(self):
            return {name: far(getattr(self, name), want) for name, want in self.wanted().items()}

    def finish(*results):
        gc.collect()
        report([*results, whole(), number("live").value, number("slow").value])
    """

SHAPES = {
    "nhwc": [
        (3, 5, 4, 6),  # one column for each channel
        (8, 3, 16, 16),  # 8 of them
        (2, 4, 8, 8, 12),  # rank 5, 6 of them
        (6, 3, 199),  # 3 of them: 1194 rows have no divisor of 4
        (1024, 3),
        (5, 4, 1, 1),
        (4, 1, 16, 16),
    ],
    "nchw": [(3, 5, 4, 6), (2, 3, 32, 64), (4, 2, 3), (2, 4, 4, 8, 64), (1, 3, 16, 256)],
}
ENOUGH = [(16, 3, 32, 32), (6, 8, 1361), (32768, 3), (2, 4, 16, 16, 12)]  # smaller ones auto leaves to cuDNN
CASES = [
    (layout, shape, algorithm)
    for layout, algorithms in (
        ("nhwc", ("ex", "graph", "columns")),
        ("nchw", ("columns", "rows", "layer_norm", "graph")),
    )
    for shape in SHAPES[layout]
    for algorithm in algorithms
] + [("nhwc", shape, "auto") for shape in ENOUGH]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_the_gradients_are_right_inside_their_memory(compute: Any, layout: str, dtype: str) -> None:
    told, whole, live, slow = compute(
        SCRIPT
        + """
    told = {}
    with pybnorm.Handle("cudnn") as handle:
        for layout, shape, algorithm in values["cases"]:
            for offset in (0.0, 5.0, 100.0):
                case = Case(shape, layout, values["dtype"], offset)
                plan = case.plan(handle, algorithm)
                space = case.run(plan)
                case.run(plan, workspace=space)  # with what the first left there
                told[f"{shape} {algorithm} {offset}"] = case.errors()
                del plan
    finish(told)
    """,
        cases=[case for case in CASES if case[0] == layout],
        dtype=dtype,
    )
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"
    assert slow == 0, "cuDNN was left to find the statistics itself"
    assert len(told) == 3 * len([case for case in CASES if case[0] == layout])
    for name, worst in told.items():
        for output, error in worst.items():
            # beside the rounding of dx: that of a mean of 100 in float32, which dscale has dbias times
            allowed = 2.0**-8 if output == "dx" and dtype == "bf16" else 4e-4 if name.endswith(" 100.0") else 2e-5
            assert error < allowed, (name, worst)


def test_ex_blends_all_the_same(compute: Any) -> None:
    told, whole, live, slow = compute(
        SCRIPT
        + """
    told = {}
    with pybnorm.Handle("cudnn") as handle:
        for dtype in ("f32", "bf16"):
            case = Case((32, 3, 16, 16), dtype=dtype, alpha=2, beta=0.5)
            for algorithm in ("ex", "auto"):
                plan = case.plan(handle, algorithm)
                case.run(plan)
                told[f"{dtype} {plan.algorithm}"] = case.errors()
                del plan
    finish(told)
    """
    )
    assert (whole, live, slow) == (True, 0, 0)
    assert set(told) == {"f32 ex", "bf16 ex"}
    for name, worst in told.items():
        for output, error in worst.items():
            assert error < (2.0**-8 if output == "dx" and name.startswith("bf16") else 2e-5), (name, worst)


def test_packed_copies_of_a_view_have_their_own(compute: Any) -> None:
    chosen, errors, gaps, whole, live, slow = compute(
        SCRIPT
        + """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((32, 3, 16, 16), "slice")
        plan = case.plan(handle, "dense")
        case.run(plan)
        chosen, errors = plan.algorithm, case.errors()
        gaps = bool((case.all[..., 3:] == 7).all())
        del plan
    finish(chosen, errors, gaps)
    """
    )
    assert (whole, live, slow) == (True, 0, 0)
    assert chosen.startswith("dense+")
    assert gaps, "the other channels were written"
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_a_bad_channel_is_as_by_the_formulas_and_no_other_is_touched(compute: Any, epsilon: float) -> None:
    """Constant, NaN in one place, infinity in one place; the last is sound. With epsilon 0 the constant is 0:
    of another one every way of cuDNN makes NaN or noise, as its sums happen to round."""
    told, whole, live, slow = compute(
        SCRIPT
        + """
    told = []
    with pybnorm.Handle("cudnn") as handle:
        for layout, shape, algorithm in values["cases"]:
            edit = [(0, None, 3.25 if values["epsilon"] else 0), (1, 0, "nan"), (2, 0, "inf")]
            case = Case(shape, layout, epsilon=values["epsilon"], edit=edit)
            case.run(case.plan(handle, algorithm))
            for name, want in case.wanted().items():
                got = getattr(case, name).astype("f8")
                finite = np.isfinite(want)
                told.append([algorithm, layout, name, bool((np.isfinite(got) == finite).all()),
                             far(got[finite], want[finite]), [bool(np.isfinite(np.moveaxis(want, 1, 0)[c]).all())
                             for c in range(4)] if name == "dx" else None])
    finish(told)
    """,
        cases=[
            (layout, shape, algorithm)
            for layout, algorithms in (
                ("nhwc", ("ex", "graph", "columns")),
                ("nchw", ("columns", "rows", "layer_norm", "graph")),
            )
            for shape in ((8, 4, 16, 16), (3, 4, 5, 7))
            for algorithm in algorithms
        ],
        epsilon=epsilon,
    )
    assert (whole, live, slow) == (True, 0, 0)
    assert len(told) == 42
    for line in told:
        _, _, name, same, error, finite = line
        assert same, line
        assert error < 2e-5, line
        if name == "dx":
            assert finite == [epsilon > 0, False, False, True]


@pytest.mark.slow
def test_the_judge_passes_every_line_of_the_suite(compute: Any) -> None:
    """Of those in float32 and bfloat16 that are small: a device runs all."""
    lines = [line.strip() for line in (files("pybnorm.check") / "suites" / "algorithms.txt").read_text().splitlines()]
    problems = {
        problem
        for line in lines
        if line.startswith("backward,") and "saved=0" in line
        for problem in expand(line)
        if problem.dtype in (DataType.FLOAT32, DataType.BFLOAT16) and math.prod(problem.dims) <= 30_000
    }
    ways = {
        name: [str(p) for p in problems if p.algorithm.split(":")[0] == name]
        for name in ("auto", "ex", "graph", "columns", "rows", "layer_norm")
    }
    assert all(len(cases) >= 20 for cases in ways.values()), ways
    told, live = compute(
        """
    from pybnorm.check import runner
    from pybnorm.check.problem import Problem
    from pybnorm.devices import cpu

    class Posing(cpu.Device):
        "Memory of the host that passes for a device's, where this cuDNN computes on it."
        device_type = 2
        def from_numpy(self, *arguments):
            return super().from_numpy(*arguments)._replace(device_type=2)
        def to_numpy(self, buffer):
            return super().to_numpy(buffer._replace(device_type=1))

    told = []
    with pybnorm.Handle("cudnn") as handle:
        session = runner.Session("cudnn", handle, Posing())
        for line in values["lines"]:
            result = runner.run_case(Problem.parse(line), session)
            told.append([line, result.status.name, result.message, result.repeat])
    del session, handle
    gc.collect()
    report([told, number("live").value])
    """,
        lines=sorted(str(p) for cases in ways.values() for p in cases),
    )
    assert live == 0
    wrong = [
        line for line in told if line[1] != "PASS" and not (line[1] == "UNSUPPORTED" and refused(line[0], line[2]))
    ]
    assert not wrong, wrong


def refused(line: str, message: str) -> bool:
    """Whether a refusal is that of a view of memory in the other layout."""
    return ",nhwc," in line and "packed channels-first" in message


FAILING = """
    gc.freeze()  # what is there already is not looked through by every collection

    def count(call):
        "Makes the first vendor call in it fail, then the second, ...; what each left behind, and how it ended."
        ends, number("fail").value = [], 0
        while True:
            gc.collect()
            before = number("live").value
            number("fail").value, number("calls").value = len(ends) + 1, 0
            try:
                value = call()
                ended = getattr(value, "algorithm", "")
                del value
            except pybnorm.BackendError as error:
                ended = type(error).__name__
                del error
            reached = number("calls").value >= number("fail").value
            number("fail").value = 0
            gc.collect()
            if not reached:
                return ends
            ends.append([number("live").value - before, ended])
    """


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "algorithm", "graphs"),
    # sums, moments, the channel's; then the way itself
    [
        ("nhwc", "ex", 3), ("nhwc", "graph", 4), ("nchw", "columns", 6), ("nchw", "rows", 6), ("nchw", "graph", 4),
        ("nchw", "layer_norm", None),  # which tries its next graph after any failure
    ],
)  # fmt: skip
def test_a_vendor_call_that_fails_leaves_nothing_behind(
    compute: Any, layout: str, algorithm: str, graphs: int | None
) -> None:
    plans, whole, live, slow = compute(
        SCRIPT
        + FAILING
        + """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((8, 3, 16, 16), values["layout"])
        plans = count(lambda: case.plan(handle, values["algorithm"]))
    finish(plans)
    """,
        layout=layout,
        algorithm=algorithm,
    )
    assert (whole, live, slow) == (True, 0, 0)
    assert len(plans) > 100
    assert all(left == 0 for left, _ in plans), [i for i, (left, _) in enumerate(plans) if left]
    # the next engine configuration is tried where one cannot be made a plan of
    ends = [end for _, end in plans]
    assert set(ends) == {"InternalError", algorithm}
    assert graphs is None or ends.count(algorithm) == graphs


@pytest.mark.parametrize("saved", [False, True])
def test_auto_goes_on_to_its_next_way(compute: Any, saved: bool) -> None:
    """Which without any other is spatial, and with statistics not a way for those without."""
    plans, whole, live, slow = compute(
        SCRIPT
        + FAILING
        + """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((16, 2, 64, 96), "nchw")
        plans = count(lambda: case.plan(handle, "auto", values["saved"]))
    finish(plans)
    """,
        saved=saved,
    )
    assert (whole, live, slow) == (True, 0, 0)
    assert all(left == 0 for left, _ in plans), [i for i, (left, _) in enumerate(plans) if left]
    ends = [end for _, end in plans]
    first = "columns"
    assert ends.count(first) == (3 if saved else 6)  # by its next engine configuration, of the statistics' graphs too
    assert ends.count("spatial") > 100
    # what a plan of any way needs, the descriptors of x and the parameters among it
    assert 0 < ends.count("InternalError") == len(ends) - ends.count(first) - ends.count("spatial") < 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "algorithm", "calls"),
    # sums, moments, zeros and merge (of columns of channels-first memory one), the channel's; then the way itself
    [
        ("nhwc", "ex", 7), ("nhwc", "graph", 7), ("nchw", "columns", 12), ("nchw", "rows", 17), ("nchw", "graph", 6),
        ("nchw", "layer_norm", 13),
    ],
)  # fmt: skip
def test_a_run_that_fails_can_be_run_again(compute: Any, layout: str, algorithm: str, calls: int) -> None:
    runs, errors, whole, live, slow = compute(
        SCRIPT
        + FAILING
        + """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((8, 3, 16, 16), values["layout"])
        plan = case.plan(handle, values["algorithm"])
        space = case.run(plan)  # variant packs for these addresses are there from now on
        runs = count(lambda: case.run(plan, workspace=space))
        case.run(plan, workspace=space)
        errors = case.errors()
        del plan
    finish(runs, errors)
    """,
        layout=layout,
        algorithm=algorithm,
    )
    assert (whole, live, slow) == (True, 0, 0)
    assert runs == [[0, "InternalError"]] * calls
    assert max(errors.values()) < 2e-5, errors


def test_parameters_of_less_alignment(compute: Any) -> None:
    """By name refused before anything runs; what auto chose goes through the plain entry point."""
    refused, calls, (chosen, errors), whole, live, slow = compute(
        SCRIPT
        + """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((32, 3, 16, 16))
        odd = memory((4,))[1:]
        odd[...] = case.scale
        refused, before = [], number("calls").value
        for algorithm in ("ex", "graph"):
            plan = case.plan(handle, algorithm)
            before = number("calls").value
            refused.append(attempt(lambda: case.run(plan, scale=odd)))
            refused[-1]["calls"] = number("calls").value - before
        plan = case.plan(handle, "auto")
        before = number("calls").value
        case.run(plan, scale=odd)
        told = [plan.algorithm, case.errors()]
        calls = number("calls").value - before
        del plan
    finish(refused, calls, told)
    """
    )
    assert (whole, live, slow) == (True, 0, 1)
    assert calls == 1
    assert chosen != "spatial"
    assert max(errors.values()) < 2e-5
    for result in refused:
        assert "16-byte aligned" in result["text"], result
        assert result["calls"] == 0


CHOICES = {
    "nhwc f32 256x64x112x112": ("graph:1", "graph:1"),
    "nhwc f32 256x512x28x28": ("ex", "ex"),  # after graph:2, which the double has not
    "nhwc bf16 256x256x28x28": ("ex", "ex"),
    "nhwc f16 256x64x56x56": ("graph:1", "graph:1"),
    "nhwc f16 8x64x5x5": ("spatial", "spatial"),
    "nhwc f16 1x64x1x1": ("spatial", "spatial"),  # one value in a channel
    "nhwc f32 1048583x2x1x1": ("spatial", "spatial"),  # a prime number of rows: two columns, longer than were tried
    "nhwc f64 8x64x8x8": ("spatial", "spatial"),
    "nchw f32 256x64x112x112": ("columns", "columns"),
    "nchw f16 256x256x56x56": ("columns", "columns"),
    "nchw f32 8x64x28x28": ("spatial", "spatial"),
    "nchw f32 8x64x4x4": ("spatial", "spatial"),
    "nchw f32 16x32x64x128x128": ("spatial", "rows"),  # an image too large for columns
}


def test_what_is_chosen(child: Any, computing: str) -> None:
    """On the double the first plan of every way can be built, so that the rules alone decide."""
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        told = {}
        with pybnorm.Handle("cudnn") as handle:
            for line in values["lines"]:
                layout, dtype, shape = line.split()
                shape = tuple(map(int, shape.split("x")))
                strides = None
                if layout == "nhwc":
                    strides, step = [0] * len(shape), 1
                    for axis in (1, *range(len(shape) - 1, 1, -1), 0):
                        strides[axis], step = step, step * shape[axis]
                with pybnorm.TensorDescriptor("cudnn", dtype, shape, strides) as x:
                    plans = [handle.plan_backward(x, algorithm=name, saved=False) for name in ("auto", "fast")]
                    told[line] = [[plan.algorithm, plan.reason] for plan in plans]
        report(told)
        """,
        file=computing,
        lines=list(CHOICES),
    )
    assert {line: tuple(name for name, _ in plans) for line, plans in told.items()} == CHOICES
    for plans in told.values():
        for name, reason in plans:
            assert name == "spatial" or "shapes of the sweep" in reason, (name, reason)


def test_a_choice_by_another_devices_table_says_so(child: Any, computing_without: Any, driver: str) -> None:
    """And the ways of a residual, which cannot fall back on each other, go by the device that was measured: else Ex."""
    told, residual = child(
        """
        import ctypes, pybnorm
        pybnorm.load("cudnn", values["file"])

        def reasons(**options):
            with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", "f32", (2, 64, 8, 8)) as x:
                return [plan.reason for plan in (
                    handle.plan_backward(x), handle.plan_forward_training(x, algorithm="fast"),
                    handle.plan_forward_training(x, mode="per_activation"),
                    handle.plan_backward(x, algorithm="spatial"),
                )]

        def residual():
            last = "f16", (2, 64, 8, 8), (4096, 1, 512, 64)
            with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", *last) as x:
                try:
                    handle.plan_forward_training(x, activation="relu", z=True)
                except pybnorm.UnsupportedError as error:  # the double has neither way to it
                    return "graph" if "engine for this graph" in str(error) else str(error)

        told, ways = [reasons()], [residual()]
        driver = ctypes.CDLL(values["driver"])
        driver.driver_go(1)
        for name in (b"NVIDIA H200", b"NVIDIA H100 80GB HBM3", b"NVIDIA H200 NVL"):
            ctypes.c_char_p.in_dll(driver, "driver_name").value = name
            told.append(reasons())
            ways.append(residual())
        report([told, ways])
        """,
        file=computing_without("cudnnCreateActivationDescriptor"),
        driver=driver,
    )
    table = " (by the table of NVIDIA H200, cuDNN 9.19, 2026-11-23: there is none of this device"
    unknown, measured, too, other = told
    assert measured == too
    assert residual.pop(1) == "graph"
    assert ["lacks the activation descriptors" in error for error in residual] == [True] * 3
    assert all("table" not in reason for reason in measured)
    assert unknown == [reason + table + ")" for reason in measured[:2]] + measured[2:]
    assert other == [reason + table + ", NVIDIA H200 NVL)" for reason in measured[:2]] + measured[2:]


def test_where_the_statistics_cannot_be_computed(child: Any, computing: str, computing_without: Any) -> None:
    script = """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        told = []
        with pybnorm.Handle("cudnn") as handle:
            large = 16, 8, 16, 16
            cases = (1e-5, large), (1e-42, large), (1e-5, (1, 24576, 1, 1)), (1e-5, (1, 1, 24593, 1))  # a prime number
            for epsilon, shape in cases:
                last = shape[1] * shape[2] * shape[3], 1, shape[1] * shape[3], shape[1]
                with pybnorm.TensorDescriptor("cudnn", "f32", shape, last) as x:
                    for name in ("ex", "graph", "auto"):
                        told.append(attempt(lambda: handle.plan_backward(
                            x, algorithm=name, saved=False, epsilon=epsilon).algorithm))
            with pybnorm.TensorDescriptor("cudnn", "f32", (4, 8, 3, 5)) as x:
                told.append(attempt(lambda: handle.plan_backward(x, algorithm="ex", saved=False).workspace_size))
        report(told)
        """
    told = child(script, file=computing)
    assert [result.get("value") for result in told] == [
        "ex", "graph", "ex", None, None, "spatial", None, None, "spatial", None, None, "spatial", 320,
    ]  # fmt: skip
    assert all("epsilon as float32" in result["text"] for result in told[3:5]), told
    assert all("one value in a channel" in result["text"] for result in told[6:8]), told
    assert all("matrix of 2 to" in result["text"] for result in told[9:11]), told  # one column is none to cuDNN
    told = child(script, file=computing_without("cudnnSetTensor"))
    assert all("cudnnSetTensor" in result["text"] for result in told[:2]), told
    assert told[2] == {"value": "spatial"}


def test_without_the_graph_api_cudnn_recomputes_them(run: Any) -> None:
    """Ex over channels-first memory and the plain entry points are left to cuDNN with no statistics, as ever."""
    told, lines = run(
        """
        x, first = last((2, 8, 3, 5), "f32"), pybnorm.TensorDescriptor("cudnn", "f32", (2, 8, 3, 5))
        given = {n: BACKWARD[n] for n in BACKWARD if n not in ("y", "bias", *SAVED)}
        with pybnorm.Handle("cudnn") as handle:
            told = [attempt(lambda: handle.plan_backward(x, algorithm=name, saved=False).algorithm)
                    for name in ("ex", "graph", "auto")]
            taken()
            handle.plan_backward(first, algorithm="ex", saved=False)(**given)
            report([told, taken()])
        """
    )
    assert [result.get("value") for result in told] == [None, None, "spatial"]
    assert all("graph" in result["text"] for result in told[:2]), told
    assert len(lines) == 2
    assert " sm=0 si=0 ws=0x100000 " in lines[1]


def test_what_may_be_measured(child: Any, computing: str) -> None:
    """By tune=True: for auto nothing whose statistics are sums in any order, as of rows, and nothing untried."""
    told = child(
        """
        import pybnorm
        pybnorm.load("cudnn", values["file"])
        told = []
        with pybnorm.Handle("cudnn") as handle:
            for shape, last in (((4, 8, 3, 5), True), ((4, 8, 3, 5), False), ((2, 32, 64, 128, 128), False)):
                strides = (120, 1, 40, 8) if last else None
                with pybnorm.TensorDescriptor("cudnn", "f32", shape, strides) as x:
                    plan = handle.plan_backward(x, saved=False)
                    told.append([pybnorm._core.candidates(plan, fast) for fast in (False, True)])
        report(told)
        """,
        file=computing,
    )
    graphs = ["graph", "graph:1", "graph:2", "graph:3"]
    columns, rows = ([f"{kind}{which}" for which in ("", ":1", ":2")] for kind in ("columns", "rows"))
    assert told == [
        [["spatial", "ex", *graphs], ["spatial", "ex", *graphs, "persistent"]],
        [["spatial", *graphs, *columns], ["spatial", "ex", *graphs, *columns, *rows, "persistent"]],
        [["spatial"], ["spatial", "ex", *graphs, *rows, "persistent"]],
    ]
