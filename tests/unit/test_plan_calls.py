"""What code that a plan's call runs on its way may do, and what a plan is made of and left with, on cuDNN's double.

That code is an array's own protocol, or a signal handler: it can call the same plan, or close the handle. No lock is
held while arrays say what they are.
"""

import functools

import pytest

ARRAYS = """
    import contextlib, gc, itertools

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

    def array(name, value, first=None):
        "An argument that was an address."
        if isinstance(value, tuple):
            return space(value[0], first, value[1])
        return (data if name in ("x", "y", "z", "dy", "dx", "dz") else Memory)(value, first)

    def arrays(arguments, evil=(), first=None):
        "All arguments as arrays, or some that do something first."
        return arguments | {n: array(n, arguments[n], first) for n in evil or arguments}

    def addresses(line):
        return [w.partition("@")[2] for w in line.split() if "@" in w]

    X = last((2, 8, 12, 12))
    INFERENCE = {n: FORWARD[n] for n in ("x", "scale", "bias", "running_mean", "running_variance", "y")}
    PLAIN = {n: BACKWARD[n] for n in BACKWARD if n not in ("y", "bias")}
    KINDS = {
        "training": ("plan_forward_training", FORWARD, {"algorithm": "ex"}),
        "inference": ("plan_forward_inference", INFERENCE, {"algorithm": "pointwise"}),
        "backward": ("plan_backward", PLAIN, {"algorithm": "ex"}),
    }
    """


TRAINING = "cudnnBatchNormalizationForwardTraining"  # the plain entry point


@pytest.fixture
def play(run, grapher):
    """Runs a script behind `ARRAYS`."""
    return functools.partial(run, ARRAYS, file=grapher)


# ---------------------------------------------------------------- a plan called during its own call


@pytest.mark.parametrize("kind", ["training", "inference", "backward"])
def test_a_plan_called_by_its_own_arguments(play, kind):
    """They are read before the call begins, so that the inner call is one like any other."""
    lines, inner, after = play(
        """
        import signal
        inner_calls, lines = [], []
        with pybnorm.Handle("cudnn") as handle:
            make, outer, options = KINDS[values["kind"]]
            plan = getattr(handle, make)(X, **options)
            inner = outer | {n: outer[n] + 0x1000 for n in outer if n in ("x", "dy" if "dy" in outer else "y", "dx")}

            def again(*_):
                inner_calls.append(attempt(lambda: plan(**inner)))

            signal.signal(signal.SIGALRM, again)
            for name in outer:
                for how in (again, lambda: signal.raise_signal(signal.SIGALRM)):
                    plan(**inner)  # a graph says what it binds if that is not what it last was
                    taken()
                    plan(**arrays(outer, [name], how))
                    lines.append([name, [addresses(line) for line in taken() if "@" in line][-1]])
            plan(**arrays(outer, first=again))
            taken()
            plan(**inner)
            report([lines, inner_calls, [addresses(line) for line in taken() if "@" in line][-1]])
        """,
        kind=kind,
    )
    assert len(inner) == 3 * len(lines) // 2  # each name twice, and all of them at once
    assert [told for told in inner if told != {"value": None}] == []
    for name, seen in lines:
        assert seen != after, name
        assert set(seen) & {"0x10000", "0x20000", "0x30000"}, (name, seen)
        assert not set(seen) & {"0x11000", "0x21000", "0x31000"}, (name, seen)


def test_a_plan_whose_call_failed_can_be_called_again(play):
    failures, told, failed, lines = play(
        """
        failures = []

        def fails():
            failures.append(1)
            raise KeyboardInterrupt  # which, unlike an Exception, nobody makes an ArgumentError of

        with pybnorm.Handle("cudnn") as handle:
            plans = [(getattr(handle, make)(X, **options), good) for make, good, options in KINDS.values()]
            taken()
            told = []
            for plan, good in plans:
                for name in good:
                    with contextlib.suppress(KeyboardInterrupt):
                        plan(**arrays(good, [name], fails))
                told.append(attempt(lambda: plan(**good | {"y" if "y" in good else "dx": good["x"]})))
            number("status").value = 5000
            failed = [attempt(lambda: plan(**good)) for plan, good in plans]
            number("status").value = 0
            taken()
            for plan, good in plans:
                plan(**good)
            report([len(failures), told, failed, taken()])
        """
    )
    assert failures == 9 + 6 + 9
    assert [result["error"] for result in told + failed] == ["ArgumentError"] * 3 + ["ExecutionError"] * 3
    assert [line.split()[0] for line in lines] == ["forward", "execute", "backward"]


def test_a_call_during_a_call_of_the_handles_own_plan_has_one_of_its_own(play):
    orders, live, closed, left = play(
        """
        vectors = {n: FORWARD[n] for n in VECTORS} | {"workspace": FORWARD["workspace"]}
        live, orders = [], []
        with pybnorm.Handle("cudnn") as handle:
            def call(base, first=None, name="scale"):
                given = arrays(vectors) | {name: array(name, vectors[name], first)}
                handle.forward_training(data(base), y=data(base + 0x4000), algorithm="ex", **given)

            call(0x10000)
            for name in vectors:
                for inner in (lambda: call(0x20000), lambda: call(0x20000, lambda: call(0x30000), "workspace")):
                    taken()
                    call(0x10000, inner, name)
                    orders.append([addresses(line)[0] for line in taken() if line.startswith("forward mode")])
                    live.append(number("live").value)
            closed = attempt(lambda: call(0x10000, handle.close, "workspace"))
        report([orders, live, closed, number("live").value])
        """
    )
    assert orders == [["0x20000", "0x10000"], ["0x30000", "0x20000", "0x10000"]] * 7
    assert len(set(live)) == 1  # the plans of the inner calls went with them
    assert closed["error"] == "ClosedError"
    assert left <= live[0]


# ---------------------------------------------------------------- a handle closed during a call


def test_a_handle_closed_during_a_plans_call_is_not_used(play):
    told, nobodys, lines = play(
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
                plan = getattr(handle, kind)(X, **options)
                taken()
                told.append([name, attempt(lambda: plan(**arrays(good, [name], handle.close)))])
                lines += taken()
            handle = pybnorm.Handle("cudnn")
            told.append(["x", attempt(lambda: getattr(handle, kind)(data(0x10000, handle.close), **options))])
        nobodys = []
        for kind in (pybnorm.ForwardTrainingPlan, pybnorm.ForwardInferencePlan, pybnorm.BackwardPlan):
            plan = kind.__new__(kind)
            told.append(["never made", attempt(lambda: plan(*[0x10000] * 6))])
            nobodys.append(repr(plan))
        report([told, nobodys, lines + taken()])
        """
    )
    assert [line for line in lines if line != "cudnnDestroy"] == []
    assert len(told) == 11 + 7 + 13 + 3 + 3
    for name, result in told:
        assert result.get("error") == "ClosedError", (name, result)
    assert all("never made" in text for text in nobodys)


# ---------------------------------------------------------------- engine configurations


def test_a_heuristic_that_counts_more_than_was_asked_for(play):
    refused, tried, told, left = play(
        """
        with pybnorm.Handle("cudnn") as handle:
            before = number("live").value
            number("configs").value, number("unbuilt").value = 1000, 1
            refused = [attempt(lambda: handle.plan_forward_training(X, algorithm="graph")),
                       attempt(lambda: handle.plan_forward_inference(X, algorithm="pointwise:9"))]
            tried = number("tried").value
            number("unbuilt").value = number("tried").value = 0
            plan = handle.plan_forward_training(X, algorithm="graph:9")
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

KEPT = """
        handle = pybnorm.Handle("cudnn")
        fused = {"activation": "relu", "algorithm": "ex"}
        plans = [handle.plan_forward_training(X, **o) for o in ({"algorithm": "graph"}, fused)]
        handle.forward_training(data(0x10000), y=data(0x20000), algorithm="graph", workspace=FORWARD["workspace"],
                                **arrays(VECTORS))
"""


def test_a_forked_child_leaves_the_parents_plans_alone(play):
    (text, shown, *rest), parent = play(
        KEPT,
        """
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
            mine = own.plan_forward_training(X, **fused)
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
        """,
    )
    assert "made before fork()" in text
    assert "spawn or forkserver" in text  # for which a device works
    assert "made before fork()" in shown
    assert rest == [True, 0, 1]
    assert min(parent) > 0


@pytest.mark.parametrize("early", [False, True])
def test_nothing_of_a_plan_is_destroyed_at_exit(play, child, early):
    play(
        KEPT,
        """
        import atexit
        sys.kept = plans[1], handle  # outlives this module's own teardown
        number("aloud").value = 1
        if values["early"]:
            atexit.register(plans.pop, 0)  # runs while everything is still there
        report(None)
        """,
        early=early,
    )
    assert ("destroyed" in child.stderr) == early


# ---------------------------------------------------------------- alignment


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_what_auto_takes_for_less_aligned_arrays_can_be_run(play, dtype):
    answer = play(
        """
        dtype, vectors, answer = values["dtype"], arrays(VECTORS), []
        for saved, offset, kind in itertools.product((True, False), values["offsets"], ("training", "backward")):
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
        where, aligned = (saved, offset, kind), offset == 16
        own = "spatial" if kind == "backward" else "ex" if saved else "graph"
        assert algorithm == (own if aligned else "spatial"), where
        refused = named.get("error") == "UnsupportedError" and "16-byte aligned" in named["text"]
        assert ("error" in named, refused) == (not aligned, not aligned), where
        assert ("error" in fused) == (not aligned), (where, fused)
        assert aligned or "-byte aligned" in fused["text"], where
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
    told, lines, good, numbered = play(
        """
        few = arrays({n: VECTORS[n] for n in ("scale", "bias", "running_mean", "running_variance")})
        some = arrays({n: BACKWARD[n] for n in ("scale", "dscale", "dbias")})
        x, y = data(0x10000), data(0x20000)
        with pybnorm.Handle("cudnn") as handle:
            taken()
            told = [attempt(f) for bad in ("auto:1", "graph:", "graph:1" + chr(0), "", "AUTO", [1], 3, b"auto", True)
                    for f in (
                        lambda: handle.plan_forward_training(X, algorithm=bad),
                        lambda: handle.forward_training(x, y=y, algorithm=bad, **arrays(VECTORS)),
                        lambda: handle.forward_inference(x, y=y, algorithm=bad, **few),
                        lambda: handle.backward(x, y, dx=data(0x30000), algorithm=bad, **some),
                        lambda: handle.workspace_size("backward", X, algorithm=bad))]
            lines = taken()
            good = [attempt(lambda: handle.plan_forward_training(X, algorithm=a)) for a in ("graph:9", "pointwise:0")]
        report([told, lines, good, [[pybnorm._core.numbered_algorithms(b), pybnorm.algorithms(b)]
                                    for b in pybnorm.backends()]])
        """
    )
    assert lines == []
    assert [result["error"] for result in told] == ["ArgumentError"] * 25 + ["ArgumentTypeError"] * 20
    assert all(result["text"].startswith("algorithm: got ") for result in told)
    assert all("graph, pointwise also with :0 to :9" in result["text"] for result in told[:25])
    assert "ArgumentError" not in [result.get("error") for result in good]
    assert all(set(marked) <= set(names) for marked, names in numbered)
    assert numbered[0][0] == ["graph", "pointwise"]


def test_no_workspace_is_also_a_pair_of_zeros(play):
    told, lines = play(
        """
        size = number("workspace", ctypes.c_size_t)
        with pybnorm.Handle("cudnn") as handle:
            needs = handle.plan_forward_training(X, algorithm="ex")
            fused = handle.plan_forward_training(X, activation="relu", z=True)
            size.value = 0
            plan = handle.plan_forward_training(X, algorithm="ex")
            assert (plan.workspace_size, handle.memory(None)) == (0, (0, 0))
            taken()
            for workspace in (None, (0, 0), (0x100000, 0), (0x100001, 3), (0x100001, 1 << 20), space(0x100003)):
                plan(**FORWARD | {"workspace": workspace})
            plan(**FORWARD | {"reserve": (0, 0)})
            handle.forward_training(
                data(0x10000), y=data(0x20000), algorithm="ex", workspace=(0, 0), **arrays(VECTORS))
            lines = [line for line in taken() if line.startswith("forward mode")]
            told = [["workspace", attempt(lambda: needs(**FORWARD | {"workspace": w}))]
                    for w in ((0, 0), (0x100001, 8192))]
            told.append(["reserve", attempt(lambda: fused(**FORWARD | {"z": 0x50000, "reserve": (0, 0)}))])
            told += [[name, attempt(lambda: plan(**FORWARD | {"workspace": w}))] for name, w in (
                ("workspace", (0, 8)), ("workspace", (1 << 64, 0)), ("workspace", (0, -1)), ("workspace", (0, "0")),
                ("y", (FORWARD["y"] + 1, 8)))]
            assert not taken()
        report([told, lines])
        """
    )
    assert len(lines) == 8
    assert all(" ws=0 " in line and " sizes=0,0 " in line for line in lines)
    for number, (name, result) in enumerate(told):
        assert ("WorkspaceError" if number < 3 else "ArgumentError") in result["classes"], result
        assert name in result["text"], result


def test_a_handles_call_fuses_what_a_plan_does(play):
    told, refused, workspace = play(
        """
        told = []
        relu = {"algorithm": "ex", "activation": "relu"}
        clamp = {"algorithm": "ex", "activation": "clamp", "activation_low": 0.0, "activation_high": 1.0}
        with pybnorm.Handle("cudnn") as handle:
            for kind, values, algorithm in (
                ("forward_training", FORWARD, "ex"), ("backward", BACKWARD, "ex"),
                ("forward_inference", INFERENCE, "pointwise"),
            ):
                options = {"algorithm": algorithm, "activation": "relu"}
                values = values | {"workspace": (0x100000, 8192)}
                getattr(handle, "plan_" + kind)(X, **options)(**values)
                told.append([[line for line in taken() if "@" in line]])
                for _ in range(2):
                    getattr(handle, kind)(**arrays(values), **options)
                    told[-1].append([line for line in taken() if "@" in line])
            given = arrays(BACKWARD)
            refused = [attempt(lambda: handle.backward(**given | changes, **options)) for changes, options in (
                ({"y": None}, relu), ({"bias": None}, relu), ({"bias": None}, {"algorithm": "ex"}), ({}, clamp),
                ({}, {"algorithm": "spatial", "activation": "relu"}))]
            workspace = handle.workspace_size("backward", X, algorithm="ex", activation="relu")
        report([told, refused, workspace])
        """
    )
    assert workspace == 4096
    for number, (planned, first, second) in enumerate(told):
        one, other = ([w for w in line.split() if not w.startswith("#8@")] for (line,) in (planned, first))
        assert one == other  # but for the graph's own copy of epsilon
        assert second == ([] if number == 2 else first)  # a graph binds what is new to it
    for result, name in zip(refused, ("y", "bias", "y", "activation"), strict=False):
        assert (result["error"], result["text"].partition(":")[0]) == ("ArgumentError", name)
    assert refused[4]["error"] == "UnsupportedError"
    assert "only the Ex entry points" in refused[4]["text"]


# ---------------------------------------------------------------- a handle that is collected


def test_a_collected_handle_is_released_though_its_warning_is_an_error(play):
    *counts, text, last = play(
        """
        import warnings
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
    assert [*counts, last] == [1, 0, 1, 0]
    assert "ResourceWarning" in text
