"""The adapter of MIOpen on the double that computes: what it hands the vendor, and what it does with the answers."""

import pytest

PRELUDE = """
    import ctypes
    import numpy as np
    import pybnorm

    library = ctypes.CDLL(values["file"])
    pybnorm.load("miopen", values["file"])
    live = ctypes.c_int.in_dll(library, "double_live_descriptors")
    status = ctypes.c_int.in_dll(library, "double_status")
    """


@pytest.fixture
def play(child, doubles):
    """Runs a script behind `PRELUDE` on the double of a version."""

    def run(script, version=3004000, **values):
        file = doubles.build("miopen", version=version, defines=("DOUBLE_COMPUTES",))
        return child(PRELUDE, script, file=file, **values)

    return run


STATUSES = {  # the class and words of the text
    1: ("NotInitializedError", "not initialized"),
    2: ("BadParameterError", "invalid"),
    3: ("BadParameterError", "parameter"),
    4: ("AllocationError", "allocation"),
    5: ("InternalError", "building a kernel"),
    6: ("NotSupportedError", "no solver"),
    7: ("InternalError", "without a number"),
    8: ("NotSupportedError", "not supported"),
    9: ("ExecutionError", "no result"),
    10: ("VersionMismatchError", "another MIOpen version"),
    98: ("InternalError", ""),  # bytes that are no UTF-8
    99: ("InternalError", ""),  # no text
}


def test_every_status_has_a_class_and_a_text_even_if_the_vendor_has_none(play):
    answers, create, no_device = play(
        """
        answers = []
        handle = pybnorm.Handle("miopen")
        for status.value in (*range(1, 11), 98, 99):
            try:
                handle.stream
            except pybnorm.VendorError as error:
                answers.append([type(error).__name__, error.status, error.status_name, error.text])
        status.value = 7
        create = attempt(lambda: pybnorm.Handle("miopen"))["error"]
        ctypes.c_int.in_dll(library, "double_no_device").value = 1
        no_device = attempt(lambda: pybnorm.Handle("miopen"))["error"]
        status.value = 0
        report([answers, create, no_device])
        """
    )
    assert (create, no_device) == ("InternalError", "NotInitializedError")
    for (number, (kind, said)), (found, status, name, text) in zip(STATUSES.items(), answers, strict=True):
        assert (found, status) == (kind, number)
        assert said in text
        assert name == {98: "\ufffd\ufffd", 99: "unknown miopenStatus_t"}.get(number, "miopenStatusDouble")


def test_descriptors_are_handed_back_and_read_as_they_are(play):
    answers = play(
        """
        before = live.value
        answers = {"views": []}
        for dims in ((2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 3, 1, 2, 1, 2, 1, 2)):
            with pybnorm.TensorDescriptor("miopen", "f32", dims) as x:
                for mode in ("spatial", "per_activation"):
                    with pybnorm.derive_bn_tensor_descriptor(x, mode) as derived:
                        wanted = (1, 3, *(dims[2:] if mode == "per_activation" else [1] * (len(dims) - 2)))
                        steps = [step // 4 for step in np.empty(wanted, "f").strides]
                        answers["views"].append([derived.dims, derived.strides] == [wanted, tuple(steps)])
        x = pybnorm.TensorDescriptor("miopen", "bf16", (3, 2, 5), (10, 1, 2))
        answers["made"] = [*x.query()[1:], x.query()[0].short]
        borrowed = pybnorm.TensorDescriptor.from_pointer("miopen", x.pointer)
        answers["borrowed"] = [borrowed.dims, borrowed.strides, borrowed.dtype.short]
        inside = live.value
        del borrowed
        answers["of the borrowed"] = inside - live.value  # its view for calls, not the other's
        fields = ctypes.cast(x.pointer, ctypes.POINTER(ctypes.c_int))  # dtype and rank
        for name, place, value in (("rank 9", 1, 9), ("int32", 0, 2)):
            kept, fields[place] = fields[place], value
            answers[name] = attempt(lambda: pybnorm.TensorDescriptor.from_pointer("miopen", x.pointer))
            fields[place] = kept
        x.close()
        handle = pybnorm.Handle("miopen")
        for name, last in (("most", 2**15 - 1), ("more", 2**15)):  # elements: 2**31 - 2**16, 2**31
            with pybnorm.TensorDescriptor("miopen", "f32", (2**16, last)) as x:
                answers[name] = attempt(lambda: handle.workspace_size("forward_training", x, mode="spatial"))
        ctypes.c_int.in_dll(library, "double_wrong_derivation").value = 1
        with pybnorm.TensorDescriptor("miopen", "f32", (2, 3, 4, 5)) as x:
            answers["wrong"] = attempt(lambda: pybnorm.derive_bn_tensor_descriptor(x, "spatial"))
        handle.close()
        del x, derived, handle
        answers["left"] = live.value - before
        report(answers)
        """
    )
    assert answers["views"] == [True] * 10
    assert answers["made"] == answers["borrowed"] == [[3, 2, 5], [10, 1, 2], "bf16"]
    assert (answers["of the borrowed"], answers["left"]) == (1, 0)
    assert "rank is above 8" in answers["rank 9"]["text"]
    assert "miopenDataType_t" in answers["int32"]["text"]
    assert answers["most"] == {"value": 0}
    assert "32 bits" in answers["more"]["text"]
    assert answers["wrong"]["error"] == "InternalError"


def test_factors_are_refused_by_name_where_float32_or_float16_change_them(play):
    refused, taken = play(
        """
        handle = pybnorm.Handle("miopen")
        wide, half, x16 = (pybnorm.TensorDescriptor("miopen", name, (2, 3, 4, 5)) for name in ("f32", "f16", "bf16"))

        def size(operation, x=wide, **options):
            return attempt(lambda: handle.workspace_size(operation, x, mode="spatial", **options))
        refused = {
            "alpha": size("forward_training", alpha=1e-40), "beta": size("forward_inference", beta=1e-40),
            "alpha_param": size("backward", alpha_param=-1e-40), "beta_param": size("backward", beta_param=1e-40),
            "2**-14": size("forward_training", half, beta=2.0**-15),
            "65504": size("forward_training", half, beta=65505.0),
            "bfloat16": size("forward_training", x16, beta=0.5),
        }
        taken = [size(*a, **o)["value"] for a, o in (
            (("forward_training",), {}), (("forward_training",), {"alpha": 2.0}), (("backward",), {"alpha": 2.0}),
            (("forward_training",), {"beta": 1.1754943508222875e-38}), (("forward_training", half), {"beta": 2.0**-14}),
            (("forward_training", half), {"beta": 65504.0}), (("backward",), {"beta_param": 1.0}),
            (("forward_training", half), {"alpha": 1e-10}), (("forward_training", x16), {"alpha": 3.0}),
        )]
        report([refused, taken])
        """
    )
    for name, answer in refused.items():
        assert answer["error"] == "UnsupportedError", name
        assert name in answer["text"]
    assert taken == [0, 512, 256, 512, 256, 256, 512, 512, 512]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_elements_are_copied_between_any_strides(play, dtype):
    """The double ends the process where MIOpen would take rows of 7 with 3 steps of 2 for one axis without gaps."""
    answers = play(
        f"""
        handle, kind = pybnorm.Handle("miopen"), np.dtype("{dtype}")
        answers, left = {{}}, 0
        for name, dims, steps in (
            ("misread", (4, 3), (7, 2)), ("gaps", (2, 3, 4), (40, 11, 2)), ("turned", (2, 3, 4), (1, 2, 6)),
            ("two", (2, 1), (3, 1)), ("eight", (2, 3, 2, 2, 2, 2, 2, 2), (1, 900, 3, 409, 9, 199, 20, 47)),
        ):
            span = 1 + sum((d - 1) * s for d, s in zip(dims, steps))
            x = np.arange(np.prod(dims)).reshape(dims).astype(kind)
            y = np.full(span, -1, kind)
            view = np.lib.stride_tricks.as_strided(y, dims, [s * kind.itemsize for s in steps])
            packed, gappy = (pybnorm.TensorDescriptor("miopen", kind, dims, s) for s in (None, steps))
            back = np.empty_like(x)
            pybnorm.axpby(handle, 1.0, packed, x.ctypes.data, 0.0, gappy, y.ctypes.data)
            for _ in range(2):  # the second makes no plan
                before = live.value
                pybnorm.axpby(handle, 1.0, gappy, y.ctypes.data, 0.0, packed, back.ctypes.data)
            left += live.value - before
            right = bool((view == x).all() and (back == x).all() and (y != -1).sum() == x.size)
            factors = None
            if kind == np.float32:
                size = handle.workspace_size("axpby", gappy, y_desc=packed, alpha=2.0, beta=-3.0)
                space = np.empty(size + 64, np.uint8)
                start = -(-space.ctypes.data // 64) * 64
                pybnorm.axpby(handle, 2.0, gappy, y.ctypes.data, -3.0, packed, back.ctypes.data,
                              workspace=start, workspace_size=size)
                factors = bool((back == -x).all())
                for short in ({{}}, {{"workspace": start, "workspace_size": size - 1}}):
                    attempted = attempt(lambda: pybnorm.axpby(
                        handle, 2.0, gappy, y.ctypes.data, 0.0, packed, back.ctypes.data, **short)) if size else None
                    factors = factors and (attempted is None or short != {{}} or attempted["error"] == "WorkspaceError")
            answers[name] = [right, factors]
        far = pybnorm.TensorDescriptor("miopen", kind, (2, 2), (2**31 - 1, 1))
        near = pybnorm.TensorDescriptor("miopen", kind, (2, 2))
        answers["far"] = attempt(lambda: handle.workspace_size("axpby", far, y_desc=near))["text"]
        answers["left"] = left
        report(answers)
        """
    )
    assert "32 bits" in answers.pop("far")
    assert answers.pop("left") == 0
    assert set(map(tuple, answers.values())) == {(True, True if dtype == "float32" else None)}


def test_auto_copies_nothing_that_the_vendor_does_not_take_and_promises_no_bits(play):
    """Gaps, and channels-last inference; what MIOpen takes runs by the entry point."""
    answers = play(
        """
        handle = pybnorm.Handle("miopen", known_defects="ignore")

        def planned(dims, steps=None, **options):
            descriptor = pybnorm.TensorDescriptor("miopen", "f32", dims, steps)
            plan = lambda: handle.plan_forward_inference(descriptor, **options)
            return attempt(lambda: [plan().algorithm, plan().deterministic])
        report([planned((4, 3, 5, 4), (120, 40, 8, 2)), planned((4, 3, 5, 8), (120, 1, 24, 3)),
                planned((4, 3, 5, 8), deterministic=True), planned((4, 3, 5, 8))])
        """
    )
    assert [answer.get("error") for answer in answers] == ["UnsupportedError"] * 3 + [None]
    assert "the bits of miopen's batch norms are not known to repeat" in answers[2]["text"]
    assert answers[3]["value"] == ["plain", False]


@pytest.mark.parametrize(("version", "found"), [(3005001, ["miopen-tuned-backward"]), (3004000, [])])
def test_a_handle_that_takes_kernels_by_their_times_has_the_defects_of_those(play, tmp_path, version, found):
    """A policy that is set, a record of another program, the variable; not on versions that cannot tune."""
    answers = play(
        """
        import pathlib
        from pybnorm.defects import Call, _takes_by_time

        folder = pathlib.Path(values["folder"])
        os.environ["MIOPEN_USER_DB_PATH"] = str(folder)
        version = pybnorm.loaded("miopen").version
        policy = ctypes.c_int.in_dll(library, "double_policy")
        call = Call(pybnorm.Operation.BACKWARD, pybnorm.Mode.SPATIAL, pybnorm.DataType.FLOAT32, (4, 4, 7, 7))

        def met():
            listed = any(d.tuned for d in pybnorm.known_defects("miopen", call, version))
            assert listed == (_takes_by_time("miopen") and version >= (3, 5))
            with pybnorm.Handle("miopen") as handle:
                return [d.id for d in pybnorm._core.defects_of(handle, call)]

        answers = {"rules": met()}
        with pybnorm.Handle("miopen") as handle:  # opened before, as under torch.backends.cudnn.benchmark
            for name, policy.value in (("opened before", 3), ("policy taken back", 1)):
                handle.plan_forward_inference(pybnorm.TensorDescriptor("miopen", "f32", (4, 4, 7, 7)))
                answers[name] = [d.id for d in pybnorm._core.defects_of(handle, call)]
        for policy.value in (2, 3, 4, 5):
            answers[f"policy {policy.value}"] = met()
        policy.value = 1
        for name in ("NONE", "SEARCH", "5", "4"):
            os.environ["MIOPEN_FIND_ENFORCE"] = name
            answers[name] = met()
        del os.environ["MIOPEN_FIND_ENFORCE"]
        record = folder / "batchnorm_gfx1100_48.HIP.3_5_1_.udb.txt"
        record.touch()
        answers["empty"] = met()
        record.write_text("2x4x4x7x7x1x0x0x1xNCHWxBwdxFP32x1=BnBwdTrainingSpatial:Variant1-1\\n")
        answers["record"] = met()
        os.environ["MIOPEN_USER_DB_PATH"] = "~nobody of this name/x"
        answers["no home"] = met()
        report(answers)
        """,
        version,
        folder=tmp_path,
    )
    by_rules = ("rules", "policy taken back", "policy 5", "NONE", "5", "empty", "no home")
    by_times = ("opened before", "policy 2", "policy 3", "policy 4", "SEARCH", "4", "record")
    assert answers == {name: found if name in by_times else [] for name in by_rules + by_times}


def test_a_failed_call_names_the_card_and_what_is_known_of_it(play):
    """MIOpen 3.4 has no sums that gfx115x can compile; of another card the error says the name alone."""
    script = """
        architecture = (ctypes.c_char * 64).in_dll(library, "double_architecture")
        failing = ctypes.c_int.in_dll(library, "double_call_status")
        x, y, p = np.ones((2, 3, 4, 4), "f"), np.ones((2, 3, 4, 4), "f"), np.ones((4, 3), "f")
        data = pybnorm.TensorDescriptor("miopen", "f32", x.shape)
        answers = []
        for failing.value in (5, 7):
            for architecture.value in (b"gfx1151", b"gfx1100", b""):
                handle = pybnorm.Handle("miopen")
                train = handle.plan_forward_training(data, algorithm=None, running=False, saved=False)
                infer = handle.plan_forward_inference(data, algorithm=None)
                for plan, count in ((train, 2), (infer, 4)):
                    arrays = [a.ctypes.data for a in (x, *p[:count], y)]
                    answers.append(attempt(lambda: plan(*arrays))["text"].splitlines()[0])
        report(answers)
        """
    said = play(script)
    named = "on gfx1151, wave size 32; known defect miopen-gfx115x-reductions, the call fails: on gfx115x"
    for first in (0, 6):
        train, infer, *others = said[first : first + 6]
        assert named in train
        assert "inference and per-activation calls do" in train
        assert infer.endswith("on gfx1151, wave size 32")
        assert all(text.endswith("on gfx1100, wave size 32") for text in others[:2])
        assert not any("wave size" in text for text in others[2:])


def test_a_mean_far_from_0_is_told_of_once_from_the_calls_own_statistics(play):
    script = """
        import warnings
        capturing = ctypes.c_int.in_dll(library, "double_capturing")
        noise = np.random.default_rng(0).normal(size=(4, 3, 4, 4)).astype("f")
        answers = []

        def told(mean, policy="warn", dims=(4, 3, 4, 4)):
            x = np.ascontiguousarray((noise + np.float32(mean)).reshape(dims))
            a, b, c, d = np.ones((4, 3), "f")
            y = np.empty_like(x)
            handle = pybnorm.Handle("miopen", known_defects=policy)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                data = pybnorm.TensorDescriptor("miopen", "f32", dims)
                plan = handle.plan_forward_training(data, algorithm=None, running=False)
                memory = np.empty(plan.workspace_size + 64, np.uint8)
                space = (-(-memory.ctypes.data // 64) * 64, plan.workspace_size) if plan.workspace_size else None
                for _ in range(2):
                    plan(*(v.ctypes.data for v in (x, a, b, y)), None, None, c.ctypes.data, d.ctypes.data, space)
            return [str(w.message) for w in found if w.category is pybnorm.KnownDefectWarning]

        answers += [told(0), told(300), told(1e4, "ignore")]
        capturing.value = 1
        answers.append(told(1e4))
        capturing.value = 0
        answers += [told(1e4), told(1e4, dims=(4, 3, 2, 8))]
        report(answers)
        """
    *silent, (text,), again = play(script)
    assert silent == [[]] * 4
    assert again == []
    assert "a mean is 1000 times its deviation or more; known defect miopen-one-pass-variance, wrong y" in text


def test_the_policy_is_asked_for_on_the_handles_device(play):
    """MIOpen answers by the device that is current; afterwards the caller's own is current again."""
    answers = play(
        """
        ctypes.c_int.in_dll(library, "double_devices").value = 2
        asked, now = ctypes.c_int.in_dll(library, "double_policy_device"), ctypes.c_int(-1)
        library.hipSetDevice(1)
        handle = pybnorm.Handle("miopen")
        library.hipSetDevice(0)
        asked.value = -1
        handle.plan_forward_inference(pybnorm.TensorDescriptor("miopen", "f32", (4, 4, 7, 7)))
        library.hipGetDevice(ctypes.byref(now))
        report([asked.value, now.value])
        """,
        3005001,
    )
    assert answers == [1, 0]


def test_a_call_with_a_defect_is_what_the_policy_says(play):
    """MIOpen has one algorithm: "auto" repairs nothing, and native is not there to avoid it."""
    answers = play(
        """
        import warnings

        ctypes.c_int.in_dll(library, "double_policy").value = 3
        x, answers = pybnorm.TensorDescriptor("miopen", "f32", (4, 3, 7, 7)), {}
        for policy in ("warn", "error", "ignore", "avoid", "avoid_all"):
            handle = pybnorm.Handle("miopen", known_defects=policy)
            for algorithm in (None, "auto"):
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    answer = attempt(lambda: handle.plan_backward(x, algorithm=algorithm).algorithm)
                told = [str(w.message) for w in found if w.category is pybnorm.KnownDefectWarning]
                answers[f"{policy} {algorithm}"] = [answer.get("value"), answer.get("text", ""), told]
            answers[f"{policy} size"] = attempt(lambda: handle.workspace_size("backward", x)).get("text", "")
        report(answers)
        """,
        3005001,
    )
    for algorithm in (None, "auto"):
        for policy in ("warn", "ignore"):
            made, _, told = answers[f"{policy} {algorithm}"]
            assert made == "plain"
            assert ["miopen-tuned-backward" in text for text in told] == [True] * (policy == "warn")
        for policy in ("error", "avoid", "avoid_all"):
            made, text, told = answers[f"{policy} {algorithm}"]
            assert (made, told) == (None, [])
            assert "known defect miopen-tuned-backward" in text
            assert ("native does not compute it here: " in text) == (policy != "error")
    assert [bool(answers[f"{policy} size"]) for policy in ("warn", "error", "ignore", "avoid")] == [False] * 3 + [True]


def test_bfloat16_gradients_of_given_sums_are_added_in_float32(play):
    """MIOpen blends no bfloat16: what a caller's `beta` asks for is refused."""
    calls, refused = play(
        """
        from pybnorm import operations
        from pybnorm._arrays import ROCM, Buffer

        def buffer(dtype, *dims):
            return Buffer(64, dims, pybnorm._arguments.packed_strides(dims), dtype, ROCM, -1, True, None)
        kinds = pybnorm.DataType.BFLOAT16, pybnorm.DataType.FLOAT32
        given = {name: buffer(kinds[0], 4, 3, 5, 5) for name in ("x", "dy", "dx")}
        vectors = "scale", "mean", "inv_variance", "sum_dy", "sum_dy_xmu"
        given |= {name: buffer(kinds[1], 1, 3, 1, 1) for name in vectors}
        with pybnorm.Handle("miopen", known_defects="ignore") as handle:
            plan = operations.plan(handle, "backward_elemt", **given, count=100)
            report([plan.calls, attempt(lambda: operations.plan(handle, "backward_elemt", **given, count=9, beta=1.0))])
        """
    )
    assert [call.split()[0] for call in calls].count("axpby") > 0
    assert refused["error"] == "UnsupportedError"
    assert "an addition that MIOpen lacks" in refused["text"]
