"""What code that a plan's call runs on its way may do, and what a plan is made of and left with, on cuDNN's double.

That code is an array's own protocol, or a signal handler: it can call the same plan, or close the handle. No lock is
held while arrays say what they are.
"""

import textwrap

import pytest

ARRAYS = """
    import contextlib, itertools

    class Memory:
        "Device memory that does something before it says where it is."

        def __init__(self, address, first=None, shape=(8,), kind="<f4", strides=None):
            self.first = first
            self.said = {"shape": shape, "typestr": kind, "data": (address, False), "strides": strides, "version": 3}

        @property
        def __cuda_array_interface__(self):
            first, self.first = self.first, None
            if first is not None:
                first()
            return self.said

    def data(address, first=None, dtype="f16", images=2):
        size = {"f16": 2, "f32": 4}[dtype]
        steps = tuple(n * size for n in (1152, 1, 96, 8))
        return Memory(address, first, (images, 8, 12, 12), f"<f{size}", steps)

    def space(address, first=None, count=8192):
        return Memory(address, first, (count,), "|u1")

    def evil(arguments, name, first):
        "The arguments, of which one does something first."
        value = arguments[name]
        if isinstance(value, tuple):
            return arguments | {name: space(value[0], first, value[1])}
        return arguments | {name: (data if name in ("x", "y", "z", "dy", "dx", "dz") else Memory)(value, first)}

    def addresses(line):
        return [w.partition("@")[2] for w in line.split() if "@" in w]

    INFERENCE = {n: FORWARD[n] for n in ("x", "scale", "bias", "running_mean", "running_variance", "y")}
    PLAIN = {n: BACKWARD[n] for n in BACKWARD if n not in ("y", "bias")}
    """


TRAINING = "cudnnBatchNormalizationForwardTraining"  # the plain entry point


@pytest.fixture
def play(run, grapher):
    """Runs a script behind `ARRAYS`."""

    def behind(script, **values):
        return run(textwrap.dedent(ARRAYS) + textwrap.dedent(script), file=grapher, **values)

    return behind


# ---------------------------------------------------------------- a plan called during its own call

PLANS = {
    "training": ("handle.plan_forward_training(x, algorithm='ex')", "FORWARD", ("x", "y")),
    "inference": ("handle.plan_forward_inference(x, algorithm='pointwise')", "INFERENCE", ("x", "y")),
    "backward": ("handle.plan_backward(x, algorithm='ex')", "PLAIN", ("x", "dy", "dx")),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_called_by_its_own_arguments(play, kind):
    """They are read before the call begins, so that the inner call is one like any other."""
    make, arguments, moved = PLANS[kind]
    told = play(
        """
        import signal
        told = []
        with pybnorm.Handle("cudnn") as handle:
            x = last((2, 8, 12, 12))
            plan, outer = eval(values["make"]), eval(values["arguments"])
            inner = outer | {n: outer[n] + 0x1000 for n in values["moved"]}

            def again(*_):
                told.append(attempt(lambda: plan(**inner)))

            signal.signal(signal.SIGALRM, again)
            for name in outer:
                for how in (again, lambda: signal.raise_signal(signal.SIGALRM)):
                    plan(**inner)  # a graph says what it binds if that is not what it last was
                    taken()
                    plan(**evil(outer, name, how))
                    told.append([name, [addresses(line) for line in taken() if "@" in line]])
            everywhere = outer
            for name in outer:
                everywhere = evil(everywhere, name, again)
            plan(**everywhere)
            taken()
            plan(**inner)
            told.append([addresses(line) for line in taken() if "@" in line])
        report(told)
        """,
        make=make,
        arguments=arguments,
        moved=moved,
    )
    *pairs, after = told
    inner = [told for told in pairs if isinstance(told, dict)]
    lines = [told for told in pairs if isinstance(told, list)]
    assert len(inner) == 3 * len(lines) // 2  # each name twice, and all of them at once
    assert {"value": None} in inner
    assert [told for told in inner if told != {"value": None}] == []
    for name, seen in lines:
        assert seen[-1] != after[-1], name
        assert [a for a in seen[-1] if a in ("0x10000", "0x20000", "0x30000")], (name, seen)
        assert not [a for a in seen[-1] if a in ("0x11000", "0x21000", "0x31000")], (name, seen)


def test_a_plan_whose_call_failed_can_be_called_again(play):
    told, lines = play(
        """
        failures = []

        def fails():
            failures.append(1)
            raise KeyboardInterrupt  # which, unlike an Exception, nobody makes an ArgumentError of

        def interrupted(call):
            with contextlib.suppress(KeyboardInterrupt):
                call()

        with pybnorm.Handle("cudnn") as handle:
            plans = [
                (handle.plan_forward_training(last((2, 8, 12, 12)), algorithm="ex"), FORWARD),
                (handle.plan_forward_inference(last((2, 8, 12, 12)), algorithm="pointwise"), INFERENCE),
                (handle.plan_backward(last((2, 8, 12, 12)), algorithm="ex"), PLAIN),
            ]
            taken()
            told = []
            for plan, good in plans:
                for name in good:
                    interrupted(lambda: plan(**evil(good, name, fails)))
                told.append(attempt(lambda: plan(**good | {"y" if "y" in good else "dx": good["x"]})))
            number("status").value = 5000
            failed = [attempt(lambda: plan(**good)) for plan, good in plans]
            number("status").value = 0
            taken()
            for plan, good in plans:
                plan(**good)
            report([[len(failures), *told, *failed], taken()])
        """
    )
    assert told[0] == 9 + 6 + 9
    assert [result["error"] for result in told[1:]] == ["ArgumentError"] * 3 + ["ExecutionError"] * 3
    assert [line.split()[0] for line in lines] == ["forward", "execute", "backward"]


def test_a_call_during_a_call_of_the_handles_own_plan_has_one_of_its_own(play):
    orders, live, descriptors = play(
        """
        vectors = {n: FORWARD[n] for n in VECTORS} | {"workspace": FORWARD["workspace"]}
        live, orders = [], []
        with pybnorm.Handle("cudnn") as handle:
            def call(base, first=None, name="scale"):
                given = {n: Memory(a) for n, a in vectors.items() if n != "workspace"}
                given["workspace"] = vectors["workspace"]
                if first is not None:
                    given |= {name: evil(vectors, name, first)[name]}
                handle.forward_training(data(base), y=data(base + 0x4000), algorithm="ex", **given)

            call(0x10000)
            for name in vectors:
                for inner in (lambda: call(0x20000), lambda: call(0x20000, lambda: call(0x30000), "workspace")):
                    taken()
                    call(0x10000, inner, name)
                    orders.append([addresses(line)[0] for line in taken() if line.startswith("forward mode")])
                    live.append(number("live").value)
            closed = attempt(lambda: call(0x10000, handle.close, "workspace"))
        report([orders, live, [closed, number("live").value]])
        """
    )
    assert orders == [["0x20000", "0x10000"], ["0x30000", "0x20000", "0x10000"]] * 7
    assert len(set(live)) == 1  # the plans of the inner calls went with them
    assert descriptors[0]["error"] == "ClosedError"
    assert descriptors[1] <= live[0]


# ---------------------------------------------------------------- a handle closed during a call


def test_a_handle_closed_during_a_plans_call_is_not_used(play):
    told, lines = play(
        """
        F = FORWARD | {"z": 0x50000, "reserve": RESERVE}
        B = BACKWARD | {"dz": 0x60000, "reserve": RESERVE}
        told, lines = [], []
        for kind, good, options in (
            ("plan_forward_training", F, {"activation": "relu", "z": True}),
            ("plan_forward_inference", INFERENCE | {"workspace": (0x100000, 8192)}, {"algorithm": "pointwise"}),
            ("plan_backward", B, {"activation": "relu", "z": True}),
        ):
            for name in good:
                handle = pybnorm.Handle("cudnn")
                plan = getattr(handle, kind)(last((2, 8, 12, 12)), **options)
                taken()
                told.append([name, attempt(lambda: plan(**evil(good, name, handle.close)))])
                lines += taken()
            handle = pybnorm.Handle("cudnn")
            told.append(["x", attempt(lambda: getattr(handle, kind)(data(0x10000, handle.close), **options))])
        report([told, lines + taken()])
        """
    )
    assert [line for line in lines if line != "cudnnDestroy"] == []
    assert len(told) == 11 + 7 + 13 + 3
    for name, result in told:
        assert result.get("error") == "ClosedError", (name, result)


def test_a_plan_that_nobody_made_is_refused(play):
    told, texts = play(
        """
        kinds = (pybnorm.ForwardTrainingPlan, pybnorm.ForwardInferencePlan, pybnorm.BackwardPlan)
        plans = [kind.__new__(kind) for kind in kinds]
        told = [attempt(lambda: plan(*[0x10000] * 6)) for plan in plans]
        report([told, list(map(repr, plans))])
        """
    )
    assert [result["error"] for result in told] == ["ClosedError"] * 3
    assert all("never made" in text for text in texts)


# ---------------------------------------------------------------- engine configurations


def test_a_heuristic_that_counts_more_than_was_asked_for(play):
    refused, tried, told, left = play(
        """
        x = last((2, 8, 12, 12))
        with pybnorm.Handle("cudnn") as handle:
            before = number("live").value
            number("configs").value, number("unbuilt").value = 1000, 1
            refused = [attempt(lambda: handle.plan_forward_training(x, algorithm="graph")),
                       attempt(lambda: handle.plan_forward_inference(x, algorithm="pointwise:9"))]
            tried = number("tried").value
            number("unbuilt").value = number("tried").value = 0
            plan = handle.plan_forward_training(x, algorithm="graph:9")
            told = [plan.algorithm, number("tried").value]
            del plan
            report([refused, tried, told, number("live").value - before])
        """
    )
    assert [result["error"] for result in refused] == ["UnsupportedError"] * 2
    assert tried == 2 * 2 * 16  # both heuristics, both plans
    assert told == ["graph:9", 10]
    assert left == 0


# ---------------------------------------------------------------- other processes, and the end of this one


def test_a_forked_child_leaves_the_parents_plans_alone(play):
    child, parent = play(
        """
        import gc
        handle = pybnorm.Handle("cudnn")
        x = last((2, 8, 12, 12))
        fused = {"activation": "relu", "algorithm": "ex"}
        plans = [handle.plan_forward_training(x, **o) for o in ({"algorithm": "graph"}, fused)]
        vectors = {n: Memory(a) for n, a in VECTORS.items()}
        handle.forward_training(data(0x10000), y=data(0x20000), algorithm="graph", workspace=FORWARD["workspace"],
                                **vectors)
        destroyed = number("destroyed")
        before = destroyed.value
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            told = [attempt(lambda: plans[0](**FORWARD))["text"], repr(handle), handle.pointer > 0]
            plans.clear()
            handle.close()
            gc.collect()
            del handle
            gc.collect()
            told.append(destroyed.value - before)
            own = pybnorm.Handle("cudnn")
            mine = own.plan_forward_training(x, **fused)
            del mine
            told.append(destroyed.value - before)
            os.write(writing, json.dumps(told).encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            child = json.load(pipe)
        os.waitpid(pid, 0)
        plans.clear()
        made = destroyed.value - before
        handle.close()
        report([child, [made, destroyed.value - before - made]])
        """
    )
    assert "made before fork()" in child[0]
    assert "spawn or forkserver" in child[0]  # for which a device works
    assert "made before fork()" in child[1]
    assert child[2:] == [True, 0, 1]
    assert min(parent) > 0


def test_nothing_of_a_plan_is_destroyed_at_exit(play, child):
    script = """
        import atexit
        handle = pybnorm.Handle("cudnn")
        x = last((2, 8, 12, 12))
        plans = [handle.plan_forward_training(x, algorithm="graph"), handle.plan_forward_training(x, activation="relu")]
        vectors = {n: Memory(a) for n, a in VECTORS.items()}
        handle.forward_training(data(0x10000), y=data(0x20000), algorithm="graph", workspace=FORWARD["workspace"],
                                **vectors)
        sys.kept = plans[1], handle  # outlives this module's own teardown
        number("aloud").value = 1
        if values["early"]:
            atexit.register(plans.pop, 0)  # runs while everything is still there
        report(None)
        """
    play(script, early=False)
    assert "destroyed" not in child.stderr
    play(script, early=True)
    assert "destroyed" in child.stderr


# ---------------------------------------------------------------- alignment


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_what_auto_takes_for_less_aligned_arrays_can_be_run(play, dtype):
    answer = play(
        """
        dtype, offsets = values["dtype"], values["offsets"]
        vectors = {n: Memory(VECTORS[n]) for n in VECTORS}
        answer = []
        for saved, offset, kind in itertools.product((True, False), offsets, ("training", "backward")):
            with pybnorm.Handle("cudnn") as handle:
                x, y, z = (data(a + offset, dtype=dtype, images=8) for a in (0x10000, 0x20000, 0x30000))
                make = handle.plan_forward_training if kind == "training" else handle.plan_backward
                plan = make(x, y, saved=saved) if kind == "training" else make(x, y, z, saved=saved)
                named = attempt(lambda: make(x, y, algorithm="ex"))
                fused = attempt(lambda: make(x, y, activation="relu"))
                ran = None
                if kind == "training":
                    taken()
                    given = {n: vectors[n] for n in VECTORS if saved or n not in SAVED} | {"x": x, "y": y}
                    plan(**given, workspace=FORWARD["workspace"])
                    handle.forward_training(**given, algorithm="auto", workspace=FORWARD["workspace"])
                    ran = [line.split()[0] for line in taken()]
                answer.append([saved, offset, kind, plan.algorithm, named, fused, ran])
        report(answer)
        """,
        dtype=dtype,
        offsets=[2, 4, 8, 16] if dtype == "f16" else [4, 8, 16],
    )
    for saved, offset, kind, algorithm, named, fused, ran in answer:
        where = (saved, offset, kind)
        own = "spatial" if kind == "backward" else "ex" if saved else "graph"
        assert algorithm == (own if offset == 16 else "spatial"), where
        if offset == 16:
            assert "error" not in named, where
        else:
            assert (named["error"], "16-byte aligned" in named["text"]) == ("UnsupportedError", True), where
        assert ("error" in fused) == (offset < 16), (where, fused)
        assert offset == 16 or "-byte aligned" in fused["text"], where
        if kind == "training":
            last = {"ex": "forward", "graph": "execute", "spatial": TRAINING}[algorithm]
            assert ran[-1:] == [last], where
            assert len([word for word in ran if word != "bound"]) >= 2, where


def test_less_aligned_parameters_go_to_the_plain_entry_point_or_are_refused(play):
    answer = play(
        """
        answer = []
        number("configs").value = 3
        with pybnorm.Handle("cudnn") as handle:
            for dtype, algorithm, offset in itertools.product(("f16", "f32"), ("auto", "ex", "graph"), (0, 4, 8)):
                x, y = (data(a, dtype=dtype, images=8) for a in (0x10000, 0x20000))
                plan = handle.plan_forward_training(x, y, algorithm=algorithm)
                taken()
                seen = attempt(lambda: plan(**FORWARD | {"x": x, "y": y, "bias": FORWARD["bias"] + offset}))
                ran = [line.split()[0] for line in taken()]
                answer.append([plan.algorithm.partition(":")[0], algorithm, offset, seen, ran])
        report(answer)
        """
    )
    assert {plan for plan, algorithm, *_ in answer if algorithm == "auto"} == {"ex"}
    for plan, algorithm, offset, seen, lines in answer:
        where = (plan, algorithm, offset)
        if offset == 0:
            assert lines[-1:] == [{"ex": "forward", "graph": "execute"}[plan]], where
        elif algorithm == "auto":
            assert lines[-1:] == [TRAINING], where
        else:
            assert (seen["error"], "16-byte aligned" in seen["text"]) == ("UnsupportedError", True), where
            assert not {"forward", "execute", TRAINING} & set(lines), where


# ---------------------------------------------------------------- names and workspaces


def test_names_are_checked_before_cudnn(play):
    told, lines, numbered = play(
        """
        x = last((2, 8, 12, 12))
        vectors = {n: Memory(a) for n, a in VECTORS.items()}
        few = {n: Memory(VECTORS[n]) for n in ("scale", "bias", "running_mean", "running_variance")}
        some = {"scale": Memory(0x1000000), "dscale": Memory(0x1001000), "dbias": Memory(0x1002000)}
        told = []
        with pybnorm.Handle("cudnn") as handle:
            taken()
            for bad in ("auto:1", "graph:", "graph:1" + chr(0), "", "AUTO", [1], 3, b"auto", True):
                told += [attempt(f) for f in (
                    lambda: handle.plan_forward_training(x, algorithm=bad),
                    lambda: handle.forward_training(data(0x10000), y=data(0x20000), algorithm=bad, **vectors),
                    lambda: handle.forward_inference(data(0x10000), y=data(0x20000), algorithm=bad, **few),
                    lambda: handle.backward(data(0x10000), data(0x20000), dx=data(0x30000), algorithm=bad, **some),
                    lambda: handle.workspace_size("backward", x, algorithm=bad),
                )]
            lines = taken()
            for good in ("graph:9", "pointwise:0"):
                assert attempt(lambda: handle.plan_forward_training(x, algorithm=good)).get("error") != "ArgumentError"
        numbered = [pybnorm._core.numbered_algorithms(backend) for backend in pybnorm.backends()]
        report([told, lines, [numbered, [pybnorm.algorithms(b) for b in pybnorm.backends()]]])
        """
    )
    assert lines == []
    assert [result["error"] for result in told] == ["ArgumentError"] * 25 + ["ArgumentTypeError"] * 20
    assert all(result["text"].startswith("algorithm: got ") for result in told)
    assert all("graph, pointwise also with :0 to :9" in result["text"] for result in told[:25])
    for marked, names in zip(*numbered, strict=True):
        assert set(marked) <= set(names)
    assert ["graph", "pointwise"] in numbered[0]


def test_no_workspace_is_also_a_pair_of_zeros(play):
    told, lines = play(
        """
        x = last((2, 8, 12, 12))
        size = number("workspace", ctypes.c_size_t)
        with pybnorm.Handle("cudnn") as handle:
            needs = handle.plan_forward_training(x, algorithm="ex")
            fused = handle.plan_forward_training(x, activation="relu", z=True)
            size.value = 0
            plan = handle.plan_forward_training(x, algorithm="ex")
            assert (plan.workspace_size, handle.memory(None)) == (0, (0, 0))
            taken()
            for workspace in (None, (0, 0), (0x100000, 0), (0x100001, 3), (0x100001, 1 << 20), space(0x100003)):
                plan(**FORWARD | {"workspace": workspace})
            plan(**FORWARD | {"reserve": (0, 0)})
            vectors = {n: Memory(a) for n, a in VECTORS.items()}
            handle.forward_training(data(0x10000), y=data(0x20000), algorithm="ex", workspace=(0, 0), **vectors)
            lines = [line for line in taken() if line.startswith("forward mode")]
            told = [attempt(f) for f in (
                lambda: needs(**FORWARD | {"workspace": (0, 0)}),
                lambda: needs(**FORWARD | {"workspace": (0x100001, 8192)}),
                lambda: fused(**FORWARD | {"z": 0x50000, "reserve": (0, 0)}),
                lambda: plan(**FORWARD | {"workspace": (0, 8)}),
                lambda: plan(**FORWARD | {"workspace": (1 << 64, 0)}),
                lambda: plan(**FORWARD | {"workspace": (0, -1)}),
                lambda: plan(**FORWARD | {"workspace": (0, "0")}),
                lambda: plan(**FORWARD | {"workspace": (FORWARD["y"] + 1, 8)}),
            )]
            assert not taken()
        report([told, lines])
        """
    )
    assert len(lines) == 8
    for line in lines:
        assert " ws=0 " in line
        assert " sizes=0,0 " in line
    assert [result["error"] for result in told[:3]] == ["WorkspaceError"] * 3
    for result, name in zip(told[2:], ("reserve", *["workspace"] * 4, "y"), strict=True):
        assert "ArgumentError" in result["classes"], result
        assert name in result["text"], result


def test_a_handles_call_fuses_what_a_plan_does(play):
    told = play(
        """
        def arrays(values):
            made = {}
            for name, value in values.items():
                if isinstance(value, tuple):
                    made[name] = space(value[0], count=value[1])
                else:
                    made[name] = (data if name in ("x", "y", "dy", "dx") else Memory)(value)
            return made

        told = {}
        with pybnorm.Handle("cudnn") as handle:
            x = last((2, 8, 12, 12))
            calls = {"forward_training": FORWARD, "backward": BACKWARD, "forward_inference": INFERENCE}
            for kind, values in calls.items():
                algorithm = "pointwise" if kind == "forward_inference" else "ex"
                options = {"algorithm": algorithm, "activation": "relu"}
                values = values | {"workspace": (0x100000, 8192)}
                getattr(handle, "plan_" + kind)(x, **options)(**values)
                planned = [line for line in taken() if "@" in line]
                lines = []
                for _ in range(2):
                    getattr(handle, kind)(**arrays(values), **options)
                    lines.append([line for line in taken() if "@" in line])
                told[kind] = [planned, *lines]
            given = arrays(BACKWARD)
            told["refused"] = [
                attempt(lambda: handle.backward(**given | changes, **options))
                for changes, options in [
                    ({"y": None}, {"algorithm": "ex", "activation": "relu"}),
                    ({"bias": None}, {"algorithm": "ex", "activation": "relu"}),
                    ({"bias": None}, {"algorithm": "ex"}),
                    ({}, {"algorithm": "ex", "activation": "clamp", "activation_low": 0.0, "activation_high": 1.0}),
                    ({}, {"algorithm": "spatial", "activation": "relu"}),
                ]
            ]
            told["workspace"] = handle.workspace_size("backward", x, algorithm="ex", activation="relu")
        report(told)
        """
    )
    refused = told.pop("refused")
    assert told.pop("workspace") == 4096
    for kind, (planned, first, second) in told.items():
        one, other = ([w for w in line.split() if not w.startswith("#8@")] for (line,) in (planned, first))
        assert one == other, kind  # but for the graph's own copy of epsilon
        assert second == ([] if kind == "forward_inference" else first), kind  # a graph binds what is new to it
    assert [(r["error"], r["text"].partition(":")[0]) for r in refused[:4]] == [
        ("ArgumentError", "y"), ("ArgumentError", "bias"), ("ArgumentError", "y"), ("ArgumentError", "activation"),
    ]  # fmt: skip
    assert refused[4]["error"] == "UnsupportedError"
    assert "only the Ex entry points" in refused[4]["text"]


def test_calls_without_an_algorithm_go_to_the_plain_entry_point(play):
    told = play(
        """
        parts = lambda names, values: {n: values[n] for n in names}
        vectors = ("scale", "bias", "running_mean", "running_variance")
        calls = {
            "forward_training": parts(("x", "y", *vectors, "saved_mean", "saved_inv_variance"), FORWARD),
            "forward_inference": parts(("x", "y", *vectors), FORWARD),
        }
        told = {}
        with pybnorm.Handle("cudnn") as handle:
            for kind, values in calls.items():
                plan = getattr(handle, "plan_" + kind)(last((2, 8, 12, 12)), algorithm=None)
                taken()
                plan(**values)
                lines = [taken()]
                given = {n: (data if n in ("x", "y") else Memory)(v) for n, v in values.items()}
                for _ in range(2):
                    getattr(handle, kind)(**given)
                    lines.append(taken())
                told[kind] = [plan.algorithm, plan.reason, *lines]
        report(told)
        """
    )
    assert set(told) == {"forward_training", "forward_inference"}
    for kind, (algorithm, reason, planned, first, second) in told.items():
        assert (algorithm, reason) == ("plain", "the entry point, and nothing else"), kind
        assert planned == first == second, kind
        assert len(planned) == 1, planned
        assert planned[0].startswith("cudnnBatchNormalizationForward"), planned


# ---------------------------------------------------------------- a handle that is collected


def test_a_collected_handle_is_released_though_its_warning_is_an_error(play):
    told = play(
        """
        import gc, warnings
        seen = []
        sys.unraisablehook = lambda unraisable: seen.append(repr(unraisable.exc_value))
        for action in ("ignore", "error"):
            warnings.simplefilter(action)
            before = number("live").value
            handle = pybnorm.Handle("cudnn")
            seen.append(number("live").value - before)
            del handle
            gc.collect()
            seen.append(number("live").value - before)
        report(seen)
        """
    )
    *counts, text, last = told
    assert [*counts, last] == [1, 0, 1, 0]
    assert "ResourceWarning" in text
