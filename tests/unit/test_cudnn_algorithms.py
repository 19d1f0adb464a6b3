"""cuDNN's algorithms by name and what "auto" takes of them, on a double that computes on the host."""

import pytest

TRAINING, INFERENCE, BACKWARD = "plan_forward_training", "plan_forward_inference", "plan_backward"
CASES = [  # call, algorithm, layout, whether statistics are saved
    *[(TRAINING, name, layout, saved) for name in ("spatial", "persistent", "ex", "graph")
      for layout in ("nchw", "nhwc") for saved in (True, False)],
    *[(BACKWARD, name, layout, True) for name in ("spatial", "persistent", "ex", "graph")
      for layout in ("nchw", "nhwc")],
    *[(BACKWARD, name, layout, False) for name in ("spatial", "ex") for layout in ("nchw", "nhwc")],
    (INFERENCE, "spatial", "nchw", True), (INFERENCE, "spatial", "nhwc", True),
    (INFERENCE, "pointwise", "nhwc", True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_results_are_right_inside_their_memory(compute, dtype):
    told, whole, live = compute(
        """
    told = {}
    with pybnorm.Handle("cudnn") as handle:
        for kind, name, layout, saved in values["cases"]:
            for shape in ((3, 5, 4, 6), (8, 3, 16, 16), (64, 3)) + (((2, 4, 3, 8, 12),) if name != "pointwise" else ()):
                case = Case(shape, layout, values["dtype"])
                plan = case.plan(handle, kind, name, saved)
                space = case.run(plan)
                case.run(plan, workspace=space)  # with what the first left there
                told[f"{kind} {name} {layout} {saved} {shape}"] = case.errors()
                del plan
    finish(told)
    """,
        cases=CASES,
        dtype=dtype,
    )
    assert whole, "something was written outside"
    assert live == 0, "descriptors were left behind"
    assert len(told) == 4 * len(CASES) - 1
    for name, worst in told.items():
        for output, error in worst.items():
            assert error < (2.0**-8 if output in ("y", "dx") and dtype == "bf16" else 2e-5), (name, worst)


# By "auto" and by "fast".
CHOICES = {
    "train nchw f32 2x8x3x5": ("spatial", "persistent"),
    "train nchw f64 2x8x3x5": ("spatial", "spatial"),
    "train nhwc f32 2x8x3x5": ("ex", "ex"),
    "train nhwc f64 2x8x3x5": ("spatial", "spatial"),
    "train nhwc f16 2x8x3x5 saved=0": ("graph", "graph"),
    "train nchw f32 64x8": ("spatial", "persistent"),  # which is channels-last memory as well
    "train nchw bf16 2x8x3x5 alpha=2": ("spatial", "persistent"),
    "train nhwc bf16 2x8x3x5 alpha=2": ("ex", "ex"),
    "train nhwc bf16 2x8x3x5 alpha=2 saved=0": ("spatial", "spatial"),
    "train nhwc f32 2x8x3x5 peract": ("plain", "plain"),
    "backward nchw f16 2x8x3x5": ("spatial", "persistent"),
    "backward nhwc f16 2x8x3x5": ("spatial", "ex"),
    "backward nhwc f16 2x8x3x5 saved=0": ("spatial", "spatial"),
    "infer nchw f32 2x8x3x5": ("spatial", "spatial"),
    "infer nhwc f32 2x8x3x5": ("pointwise", "pointwise"),
    "infer nhwc f64 2x8x3x5": ("spatial", "spatial"),
    "infer nhwc f32 2x8x3x5 alpha=2": ("spatial", "spatial"),
    "infer nchw f32 65535x8": ("spatial", "spatial"),
    "infer nchw f32 65536x8": ("pointwise", "pointwise"),
}


def test_what_is_chosen(compute):
    """On the double every algorithm can be built, so that correctness alone decides."""
    told = compute(
        """
        told = {}
        with pybnorm.Handle("cudnn", known_defects="ignore") as handle:
            for line in values["lines"]:
                operation, layout, dtype, shape, *words = line.split()
                shape = tuple(map(int, shape.split("x")))
                last = layout == "nhwc"
                strides = (shape[1] * shape[2] * shape[3], 1, shape[1] * shape[3], shape[1]) if last else None
                options = {"mode": "per_activation"} if "peract" in words else {}
                options |= {"alpha": 2.0} if "alpha=2" in words else {}
                options |= {"saved": False} if "saved=0" in words else {}
                make = {"train": handle.plan_forward_training, "infer": handle.plan_forward_inference,
                        "backward": handle.plan_backward}[operation]
                with pybnorm.TensorDescriptor("cudnn", dtype, shape, strides) as x:
                    plans = [make(x, algorithm=name, deterministic=name == "fast", **options)
                             for name in ("auto", "fast")]
                    told[line] = [[plan.algorithm, plan.reason, plan.deterministic] for plan in plans]
        report(told)
        """,
        lines=list(CHOICES),
    )
    assert {line: tuple(name for name, *_ in plans) for line, plans in told.items()} == CHOICES
    for plans in told.values():
        for name, reason, deterministic in plans:
            assert deterministic
            assert reason
            by_words = "fixed point" in reason or "coarser steps" in reason
            assert by_words == (name in ("spatial", "persistent")), (name, reason)


def test_what_no_algorithm_of_cudnn_does_says_who_does(compute):
    told = compute(
        """
        from pybnorm import Operation
        told = []
        with pybnorm.Handle("cudnn") as handle, pybnorm.TensorDescriptor("cudnn", "f32", (2, 8, 3, 5)) as x:
            told.append(attempt(lambda: handle.plan_backward(x, algorithm="graph", saved=False)))
            given = {"mode": pybnorm.Mode.SPATIAL, "alpha": 1.0, "beta": 0.0, "alpha_param": 1.0, "beta_param": 0.0,
                     "epsilon": 1e-5, "exponential_average_factor": 0.1}
            for operation, share, sums in ((Operation.BACKWARD, 0.5, False), (Operation.FORWARD_TRAINING, 0.0, True)):
                told.append(attempt(lambda: pybnorm._core.way_of(
                    handle, operation, {"x": x}, given, False, True, False, 16, share, sums)))
            asked = "spatial", "f32", "channels_first", 4
            bits = [pybnorm.capability("cudnn", o, *asked)[0] for o in ("train", "backward")]
        report([told, [int(b) & int(pybnorm.Capability.HALVES) for b in bits]])
        """
    )
    (graph, *parts), halves = told
    assert "reads the saved statistics" in graph["text"]
    assert all("native computes them" in part["text"] for part in parts), parts
    assert halves == [0, 0]


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


@pytest.mark.parametrize("algorithm", ["ex", "graph", "pointwise", "auto"])
def test_a_vendor_call_that_fails_leaves_nothing_behind(compute, algorithm):
    plans, whole, live = compute(
        FAILING,
        """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((8, 3, 16, 16))
        kinds = {"pointwise": "plan_forward_inference", "auto": "plan_forward_training"}
        kind = kinds.get(values["algorithm"], "plan_backward")
        plans = count(lambda: case.plan(handle, kind, values["algorithm"]))
    finish(plans)
    """,
        algorithm=algorithm,
    )
    assert (whole, live) == (True, 0)
    assert all(left == 0 for left, _ in plans), [i for i, (left, _) in enumerate(plans) if left]
    ends = [end for _, end in plans]
    # the next engine configuration is tried where one cannot be made a plan of; "auto" goes on to its next algorithm
    wanted = {"ex": {"InternalError"}, "auto": {"InternalError", "graph"}}
    assert set(ends) == wanted.get(algorithm, {"InternalError", algorithm})
    assert len(plans) > (5 if algorithm in ("ex", "auto") else 50)


@pytest.mark.parametrize(("kind", "algorithm"), [(BACKWARD, "ex"), (TRAINING, "graph"), (INFERENCE, "pointwise")])
def test_a_run_that_fails_can_be_run_again(compute, kind, algorithm):
    runs, errors, whole, live = compute(
        FAILING,
        """
    with pybnorm.Handle("cudnn") as handle:
        case = Case((8, 3, 16, 16))
        plan = case.plan(handle, values["kind"], values["algorithm"])
        space = case.run(plan)  # a variant pack for these addresses is there from now on
        runs = count(lambda: case.run(plan, workspace=space))
        case.run(plan, workspace=space)
        errors = case.errors()
        del plan
    finish(runs, errors)
    """,
        kind=kind,
        algorithm=algorithm,
    )
    assert (whole, live) == (True, 0)
    assert runs == [[0, "InternalError"]]
    assert max(errors.values()) < 2e-5, errors


def test_ex_over_other_memory_is_left_to_cudnn(run):
    """Without statistics, and in a library without the graph API, which says so."""
    told, lines = run(
        """
        x, first = last((2, 8, 3, 5), "f32"), pybnorm.TensorDescriptor("cudnn", "f32", (2, 8, 3, 5))
        given = {n: BACKWARD[n] for n in BACKWARD if n not in ("y", "bias", *SAVED)}
        with pybnorm.Handle("cudnn") as handle:
            told = [attempt(lambda: handle.plan_forward_training(x, algorithm=name).algorithm)
                    for name in ("graph", "auto")]
            taken()
            handle.plan_backward(first, algorithm="ex", saved=False)(**given)
            report([told, taken()])
        """
    )
    assert [result.get("value") for result in told] == [None, "ex"]
    assert "graph" in told[0]["text"]
    assert len(lines) == 2
    assert " sm=0 si=0 ws=0x100000 " in lines[1]


def test_with_factor_one_nothing_that_was_in_the_workspace_is_left(compute):
    """`unbiased=False` over a library that reads running statistics whatever their factor, as cuDNN does."""
    told, whole, _ = compute(
        """
    case, told = Case((3, 5, 4, 6), "nchw"), {}
    with pybnorm.Handle("cudnn") as handle:
        for factor, old in ((1.0, np.nan), (0.25, 2.0)):
            case.old = 0.5, old
            for algorithm in ("spatial", "graph"):
                options = {"unbiased": False, "exponential_average_factor": factor}
                case.run(case.plan(handle, "plan_forward_training", algorithm, **options))
                want = (1 - factor) * 2.0 + factor * case.x.astype("f8").var(case.axes)
                told[f"{algorithm} {factor}"] = far(case.running_variance, want)
    finish(told)
    """
    )
    assert whole
    assert max(told.values()) < 1e-5, told
