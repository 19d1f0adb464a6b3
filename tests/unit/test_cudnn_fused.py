"""What reaches cuDNN's Ex calls with an activation, on a double that writes it down, and what does not reach them.

Right results need a device: tests/backends/test_fused.py.
"""

import pytest
from doubles.build import HERE

TENSORS = {  # what cuDNN is told of each shape: rank 4 with the strides of channels-last, whatever the caller's
    (2, 8): "2,8,1,1/8,1,8,8",
    (2, 8, 5): "2,8,5,1/40,1,8,8",
    (2, 8, 3, 5): "2,8,3,5/120,1,40,8",
    (2, 8, 1, 1): "2,8,1,1/8,1,8,8",
    (2, 8, 2, 3, 5): "2,8,30,1/240,1,8,8",
}
NUMBERS = {"f32": 0, "f16": 2, "bf16": 9}


@pytest.mark.parametrize("fused", ["nothing", "activation", "residual"])
def test_what_reaches_cudnn(run, fused):
    """Every descriptor, pointer and number of the calls."""
    shapes = TENSORS if fused != "nothing" else [(2, 8, 3, 5)]  # of others the strides are the caller's
    cases = [(shape, dtype) for shape in shapes for dtype in NUMBERS]
    answers = run(
        """
        z, relu = values["fused"] == "residual", values["fused"] != "nothing"
        extra = {"z": 0x50000, "reserve": RESERVE}, {"dz": 0x60000, "reserve": RESERVE}
        extra = extra if z else ({}, {})
        backward_arguments = {n: BACKWARD[n] for n in BACKWARD if relu or n not in ("y", "bias")}
        answers = []
        with pybnorm.Handle("cudnn") as handle:
            for shape, dtype in values["cases"]:
                x = last(tuple(shape), dtype)
                options = {"activation": "relu" if relu else "none", "z": z, "epsilon": 0.25, "algorithm": "ex"}
                options |= {} if relu else {"alpha": 2.0, "beta": 3.0}
                blends = {} if relu else {"alpha_param": 4.0, "beta_param": 5.0}
                forward = handle.plan_forward_training(x, exponential_average_factor=0.5, **options)
                forward(**FORWARD, **extra[0])
                backward = handle.plan_backward(x, **options, **blends)
                backward(**backward_arguments, **extra[1])
                plans = [[p.algorithm, p.workspace_size, p.reserve_size] for p in (forward, backward)]
                answers.append([taken(), plans, forward.reason])
        report(answers)
        """,
        cases=cases,
        fused=fused,
    )
    z, relu = fused == "residual", fused != "nothing"
    ops, act = ("nothing", "activation", "residual").index(fused), "act=1,1,0" if relu else "act=-"
    rs, n = ("0x200000", 1024) if z else ("0", 0)
    blend = ("1,0", "1,0,1,0") if relu else ("2,3", "2,3,4,5")
    y_at, bias = ("0x40000", "0x1001000") if relu else ("0", "0")
    for (shape, dtype), (lines, plans, reason) in zip(cases, answers, strict=True):
        t, p = f"{NUMBERS[dtype]}:{TENSORS[shape]}", "0:1,8,1,1/8,1,1,1"
        r, y = t if z else "-", t if relu else "-"
        reserve = [f"reserve mode=2 ops={ops} {act} x={t}"] * relu
        assert lines == [
            f"forward workspace mode=2 ops={ops} x={t} z={r} y={t} param={p} {act}",
            *reserve,
            f"forward mode=2 ops={ops} alpha={blend[0]} x={t}@0x10000 z={r}@{'0x50000' if z else '0'} y={t}@0x20000 "
            f"param={p} scale=0x1000000 bias=0x1001000 rm=0x1002000 rv=0x1003000 sm=0x1004000 si=0x1005000 ws=0x100000 "
            f"rs={rs} factor=0.5 epsilon=0.25 sizes=8192,{n} {act}",
            f"backward workspace mode=2 ops={ops} x={t} y={y} dy={t} dz={r} dx={t} param={p} {act}",
            *reserve,
            f"backward mode=2 ops={ops} alpha={blend[1]} x={t}@0x10000 y={y}@{y_at} dy={t}@0x20000 "
            f"dz={r}@{'0x60000' if z else '0'} dx={t}@0x30000 param={p} scale=0x1000000 bias={bias} "
            "dscale=0x1010000 dbias=0x1020000 sm=0x1004000 si=0x1005000 ws=0x100000 "
            f"rs={rs} epsilon=0.25 sizes=8192,{n} {act}",
        ]
        assert (plans, reason) == ([["ex", 4096, n]] * 2, "asked for")


FIRST = "pybnorm.TensorDescriptor('cudnn', 'f16', (2, 8, 3, 5))"
REFUSALS = [  # (arguments of both plans, what the text says)
    ("last((2, 8, 3, 5), 'f64')", "float64"),
    (FIRST, "channels-last"),
    ("last((2, 8, 3, 5), gap=8)", "channels-last"),
    (f"last((2, 8, 3, 5)), z={FIRST}", "channels-last"),
    ("last((2, 6, 3, 5))", "multiples of 4"),
    ("last((2, 7, 3, 5)), z=True", "multiples of 4"),
    ("last((2, 8, 3, 5)), saved=False", "saved statistics"),
    ("last((2, 8, 3, 5)), mode='per_activation'", "spatial modes"),
    ("last((2, 8, 3, 5)), alpha=2.0", "alpha must be 1 and beta 0"),
    ("last((2, 8, 3, 5)), beta=1.0", "alpha must be 1 and beta 0"),
    *((f"last((2, 8, 3, 5)), algorithm='{a}'", "only the Ex entry points") for a in ("plain", "spatial", "persistent")),
    ("last((2, 8, 3, 5), 'f64'), algorithm='graph'", "float64"),
    (f"{FIRST}, algorithm='graph'", "channels-last"),
    ("last((2, 12, 3, 5)), z=True, algorithm='graph'", "multiples of 8"),
    ("last((2, 8, 3, 5)), alpha=2.0, algorithm='graph'", "alpha must be 1 and beta 0"),
]


def test_what_cudnn_cannot_fuse_is_refused_before_it(run):
    told, lines = run(
        """
        with pybnorm.Handle("cudnn") as handle:
            told = [attempt(lambda: eval(f"handle.{kind}({arguments}, activation='relu')"))
                    for kind in ("plan_forward_training", "plan_backward") for arguments in values["refusals"]]
            told += [attempt(lambda: handle.plan_backward(last((2, 8, 3, 5)), activation="relu", **{name: 0.5}))
                     for name in ("alpha_param", "beta_param")]
            report([told, taken()])
        """,
        refusals=[arguments for arguments, _ in REFUSALS],
    )
    assert lines == []
    wanted = [*[text for _, text in REFUSALS] * 2, "alpha must be 1", "alpha must be 1"]
    for result, text in zip(told, wanted, strict=True):
        assert (result.get("error"), text in result.get("text", "")) == ("UnsupportedError", True), (text, result)


def test_calls_are_held_against_the_plan(run):
    told, lines = run(
        """
        x = last((2, 8, 3, 5))
        size = 2 * 8 * 3 * 5 * 2
        with pybnorm.Handle("cudnn") as handle:
            plain = handle.plan_forward_training(x, algorithm="ex")
            single = handle.plan_forward_training(x, activation="relu")
            double = handle.plan_forward_training(x, activation="relu", z=True)
            dplain, dsingle, ddouble = [
                handle.plan_backward(x, **options)
                for options in ({"algorithm": "ex"}, {"activation": "relu"}, {"activation": "relu", "z": True})
            ]
            taken()
            f, fz = FORWARD, FORWARD | {"z": 0x50000, "reserve": RESERVE}
            b, bz = BACKWARD, BACKWARD | {"dz": 0x60000, "reserve": RESERVE}
            none = {n: b[n] for n in b if n not in ("y", "bias")}
            cases = [
                ("z", plain, f | {"z": 0x50000}), ("z", single, f | {"z": 0x50000}), ("z", double, fz | {"z": None}),
                ("z", double, fz | {"z": 0}), ("z", double, fz | {"z": 0x50001}),
                ("y", double, fz | {"z": f["y"]}), ("y", double, fz | {"z": f["y"] + size - 16}),
                ("running_mean", double, fz | {"z": VECTORS["running_mean"] - 64}),
                ("reserve", double, fz | {"reserve": None}), ("reserve", double, fz | {"reserve": (0x200000, 1023)}),
                ("reserve", double, fz | {"reserve": (0x200020, 2048)}),
                ("reserve", double, fz | {"reserve": (0x200000, "2048")}),
                ("reserve", double, fz | {"reserve": 7}),
                ("reserve", double, fz | {"reserve": (f["x"] - 1024, 1088)}),
                ("reserve", double, fz | {"reserve": (f["workspace"][0] + 4096, 2048)}),
                ("y", dplain, b), ("bias", dplain, none | {"bias": VECTORS["bias"]}),
                ("dz", dplain, none | {"dz": 0x60000}), ("dz", dsingle, b | {"dz": 0x60000}),
                ("y", dsingle, b | {"y": None}), ("bias", dsingle, b | {"bias": None}),
                ("dz", ddouble, bz | {"dz": None}), ("dz", ddouble, bz | {"dz": b["dy"]}),
                ("dz", ddouble, bz | {"dz": b["y"] + 16}), ("dx", ddouble, bz | {"dz": b["dx"]}),
                ("dx", dsingle, b | {"y": b["dx"]}), ("dscale", dsingle, b | {"bias": b["dscale"]}),
                ("reserve", ddouble, bz | {"reserve": None}),
                ("reserve", ddouble, bz | {"reserve": (b["y"] - 1024, 1088)}),
            ]
            cases += [
                ("16-byte aligned", plan, arguments | {name: arguments[name] + 8})
                for plan, arguments in ((double, fz), (ddouble, bz))
                for name in arguments if name not in ("workspace", "reserve")
            ]
            report([[[name, attempt(lambda: plan(**arguments))] for name, plan, arguments in cases], taken()])
        """
    )
    assert lines == []
    assert len(told) == 29 + 9 + 11
    for number, (name, result) in enumerate(told):
        kind = "ArgumentError" if number < 29 else "UnsupportedError"
        assert kind in result.get("classes", ()), (number, name, result)
        assert name in result["text"], (number, name, result)


def test_a_library_without_a_fused_kernel_or_the_symbols(run, doubles):
    symbols = (
        "cudnnGetBatchNormalizationTrainingExReserveSpaceSize",
        "cudnnCreateActivationDescriptor",
        "cudnnBatchNormalizationBackwardEx",
    )
    for size, without, text in ((0, (), "no fused kernel"), *((64, [symbol], "lacks") for symbol in symbols)):
        results, left = run(
            """
            with pybnorm.Handle("cudnn") as handle:
                number("workspace", ctypes.c_size_t).value = values["size"]
                x, before = last((2, 8, 3, 5)), number("live").value
                report([[attempt(lambda: handle.plan_forward_training(x, activation="relu")),
                         attempt(lambda: handle.plan_backward(x, activation="relu"))], number("live").value - before])
            """,
            file=str(doubles.build("cudnn", defines=("DOUBLE_RECORDS",), without=without)),
            size=size,
        )
        assert left == 0
        for result in results:
            assert (result["error"], text in result["text"]) == ("UnsupportedError", True), without


@pytest.mark.parametrize("z", [False, True], ids=["activation", "residual"])
def test_the_graph_of_inference(run, grapher, z):
    """The last operations of the graph, followed from y back to batch norm's result."""
    plain, fused, algorithms = run(
        """
        call = {n: FORWARD[n] for n in ("x", "scale", "bias", "running_mean", "running_variance", "y")}
        z = {"z": 0x50000} if values["z"] else {}
        with pybnorm.Handle("cudnn") as handle:
            x = last((2, 7, 3, 5))
            plan = handle.plan_forward_inference(x, algorithm="pointwise")
            plan(**call)
            plain = taken()
            named = handle.plan_forward_inference(x, algorithm="pointwise", activation="relu", z=values["z"])
            named(**call, **z)
            fused = taken()
            auto = handle.plan_forward_inference(x, activation="relu", z=values["z"])
            report([plain, fused, [named.algorithm, auto.algorithm]])
        """,
        file=grapher,
        z=z,
    )

    def words(line):
        return dict(w.split("=") for w in line.split() if "=" in w)

    bound = {address: uid for uid, address in (w.split("@") for w in fused[-2].split()[1:])}
    assert (fused[-1], plain[-1]) == ("execute", "execute")
    modes = ["0", "17", "9", "1", "1", "0"]
    assert [line.split()[1] for line in plain[:-2]] == modes
    assert [line.split()[1] for line in fused[:-2]] == [*modes, *(["0"] if z else []), "100"]
    relu, result = words(fused[-3]), words(fused[5])["y"]
    assert (relu["y"], relu["nan"], relu["type"]) == (f"{bound['0x20000']}:2", "1", "10")
    assert (result.startswith("virtual"), result.endswith(":0")) == (True, True)  # float32
    if z:
        total = words(fused[6])
        assert (total["x"], total["b"], total["y"]) == (result, f"{bound['0x50000']}:2", relu["x"])
        assert total["y"].startswith("virtual")
    else:
        assert (relu["x"], "0x50000" in bound) == (result, False)
    assert algorithms[0] == "pointwise"
    assert algorithms[1].startswith("pointwise")


def test_what_inference_cannot_fuse_is_refused(run, grapher):
    told, lines = run(
        """
        call = {n: FORWARD[n] for n in ("x", "scale", "bias", "running_mean", "running_variance", "y")}
        make = pybnorm.Handle("cudnn").plan_forward_inference
        x, first = last((2, 8, 3, 5)), pybnorm.TensorDescriptor("cudnn", "f16", (2, 8, 3, 5))
        plan, with_z = make(x, activation="relu"), make(x, activation="relu", z=x)
        taken()
        relu = {"activation": "relu"}
        told = [[text, attempt(f)] for text, f in (
            ("channels-last", lambda: make(first, **relu)),
            ("channels-last", lambda: make(x, z=first, **relu)),
            ("float64", lambda: make(last((2, 8, 3, 5), "f64"), **relu)),
            ("spatial modes", lambda: make(x, mode="per_activation", **relu)),
            ("do not blend", lambda: make(x, alpha=2.0, **relu)),
            ("only the pointwise graph", lambda: make(x, algorithm="spatial", **relu)),
            ("no Ex entry point for inference", lambda: make(x, algorithm="ex", **relu)),
            ("less aligned", lambda: with_z(**call, z=0x50004)),
            ("z: got ", lambda: make(x, z=True)),
            ("activation: got ", lambda: make(x, activation="clamp")),
            ("z: got ", lambda: make(x, z=last((2, 8, 3, 6)), **relu)),
            ("z: got ", lambda: plan(**call, z=0x50000)),
            ("z: got ", lambda: with_z(**call)),
            ("y: got ", lambda: with_z(**call, z=call["y"])),
        )]
        report([told, taken()])
        """,
        file=grapher,
    )
    assert lines == []
    for text, result in told:
        kind = "ArgumentError" if text.endswith(": got ") else "UnsupportedError"
        kind = "BadParameterError" if text == "less aligned" else kind
        assert kind in result.get("classes", ()), (text, result)
        assert result["text"].startswith(text) if kind == "ArgumentError" else text in result["text"], result


# ---------------------------------------------------------------- errors that kernels record


def test_recorded_errors_are_asked_for_and_named(run):
    first, again, modes, bad, failed = run(
        """
        with pybnorm.Handle("cudnn") as handle:
            number("recorded").value = 1007
            first, again = handle.query_runtime_error(), handle.query_runtime_error("blocking")
            handle.query_runtime_error("nonblocking"), handle.query_runtime_error(mode="raw")
            bad = [attempt(lambda: handle.query_runtime_error(m)) for m in ("raise", 2, None, "BLOCKING")]
            modes = taken()
            number("status").value = 2000
            failed = attempt(handle.query_runtime_error)
            number("status").value = 0
        closed = attempt(handle.query_runtime_error)
        report([first, again, modes, [*bad, closed], failed])
        """
    )
    assert (first, again) == ("CUDNN_STATUS_DOUBLE", None)
    assert modes == [f"query mode={m} tag=0" for m in (2, 2, 1, 0)]
    assert [b["error"] for b in bad] == ["ArgumentError"] * 4 + ["ClosedError"]
    assert all("raw | nonblocking | blocking" in b["text"] for b in bad[:4])
    assert (failed["error"], "said the double" in failed["text"]) == ("BadParameterError", True)


def test_a_library_that_records_no_errors(run, doubles):
    file = str(doubles.build("cudnn", defines=("DOUBLE_RECORDS",), without=["cudnnQueryRuntimeError"]))
    result = run("with pybnorm.Handle('cudnn') as handle: report(attempt(handle.query_runtime_error))", file=file)
    assert (result["error"], "cudnnQueryRuntimeError" in result["text"]) == ("UnsupportedError", True)


# ---------------------------------------------------------------- contexts that are lost

CONTEXTS = [  # (status, what the driver says of memory and of the stream, whether the context is lost)
    (5000, 700, 700, True),
    (5003, 0, 716, True),  # only the stream says it
    (4000, 719, 0, True),
    (1001, 710, 710, True),
    (5000, 0, 600, False),  # work is under way: CUDA_ERROR_NOT_READY
    (5000, 2, 0, False),  # out of memory
    (5000, 201, 201, False),  # no context
    (5000, 900, 901, False),  # capturing
    (2000, 700, 700, False),  # a bad parameter is the caller's
    (3000, 700, 700, False),
]


def test_a_lost_context_is_named(run, doubles):
    answers = run(
        """
        driver = ctypes.CDLL(values["driver"])
        driver.driver_go(0)
        lost, says, asked = (ctypes.c_int.in_dll(driver, f"driver_{name}") for name in ("lost", "stream", "asked"))
        x, answers = last((2, 8, 3, 5)), []
        kept = number("live").value
        for status, memory, stream, _ in values["contexts"]:
            lost.value = says.value = asked.value = number("status").value = 0
            handle = pybnorm.Handle("cudnn")
            plan, other = handle.plan_forward_training(x, activation="relu"), handle.plan_backward(x, activation="relu")
            spatial = handle.plan_forward_training(x, algorithm="spatial")
            plan(**FORWARD)
            quiet = asked.value
            lost.value, says.value, number("status").value = memory, stream, status
            told = [attempt(lambda: spatial(**FORWARD)), attempt(lambda: plan(**FORWARD))]
            calls = asked.value
            del plan, other, spatial
            told.append(attempt(handle.close))
            assert handle.closed
            handle.close()
            answers.append([quiet, told, number("live").value - kept, calls])
        report(answers)
        """,
        driver=doubles.plain("libcuda.so.1", (HERE / "cuda.c").read_text()),
        contexts=CONTEXTS,
    )
    for (status, _, _, lost), (quiet, told, left, calls) in zip(CONTEXTS, answers, strict=True):
        assert quiet == 0  # a good call asks the driver nothing
        assert left == 0
        for result in told:
            assert "VendorError" in result["classes"]
            assert "said the double" in result["text"]
            assert (result["error"] == "ContextLostError") == lost, result
            assert ("nothing more can run" in result["text"]) == lost
        if lost:
            assert "ExecutionError" in told[0]["classes"]
            assert "CUDA_ERROR_OF_THE_TEST" in told[0]["text"]
        assert (calls > 0) == (status not in (2000, 3000))


def test_without_a_driver_nothing_is_said_of_the_context(run):
    """A forgotten handle is dropped in silence."""
    result, live, told = run(
        """
        import gc, warnings
        told = []
        sys.unraisablehook = lambda hook: told.append(repr(hook.exc_value))
        handle = pybnorm.Handle("cudnn")
        plan = handle.plan_forward_training(last((2, 8, 3, 5)), activation="relu", z=True)
        number("status").value = 5000
        result = attempt(lambda: plan(**FORWARD, z=0x50000, reserve=RESERVE))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del plan, handle
            gc.collect()
        report([result, number("live").value, told])
        """
    )
    assert (result["error"], live, told) == ("ExecutionError", 0, [])
