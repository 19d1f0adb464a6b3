"""CANN's batch normalization by parts on every backend that computes, against the reference, and its rules."""

import array
import gc
import itertools
import threading

import numpy as np
import pytest
from operation_bench import strided
from parts import DTYPES, near, perform, refuse, wide
from tables import table

import pybnorm
from pybnorm import cann, operations, reference

NULLPTR, INVALID = "ACLNN_ERR_PARAM_NULLPTR, 161001", "ACLNN_ERR_PARAM_INVALID, 161002"
SUMS = ("sum_dy", "sum_dy_xmu", "grad_weight", "grad_bias")
MASKS = dict(zip(SUMS, ("input_g", "input_g", "weight_g", "bias_g"), strict=True))
# Of each function: what is read, what is written, what may be None, and its other arguments.
FUNCTIONS = {
    "reduce_backward": ("input grad_out mean invstd weight", " ".join(SUMS), "weight",
                        {"input_g": True, "weight_g": True, "bias_g": True}),
    "stats": ("input", "mean invstd", "", {"eps": 1e-3}),
    "gather_stats_with_counts": ("input", "running_mean running_var mean_all invstd_all", "running_mean running_var",
                                 {"momentum": 0.25, "eps": 1e-3, "counts": [3, 0, 7]}),
    "elemt": ("input weight bias mean invstd", "output", "weight bias", {"eps": 1e-3}),
    "elemt_backward": ("input grad_out mean invstd weight sum_dy sum_dy_xmu", "grad_input", "weight",
                       {"counter": [20, 7, 0]}),
}  # fmt: skip
DATA = ("input", "grad_out", "output", "grad_input")
FIELDS = {name: f"{read} {written}".split() for name, (read, written, _, _) in FUNCTIONS.items()}
OUTPUTS = {name: written.split() for name, (_, written, _, _) in FUNCTIONS.items()}
EVERY = [(name, field) for name in FUNCTIONS for field in FIELDS[name]]
DIMS = [(6, 5), (6, 1), (1, 5), (6, 5, 4), (4, 3, 5, 2), (2, 3, 4, 2, 3), (2, 3, 2, 1, 3, 2), (2, 3, 2, 1, 3, 2, 1, 2)]
# Dtypes of data and of vectors, since CANN lets each vector have its own, and the memory order.
KINDS = [
    *(("f32", "f32", order) for order in ("packed", "reversed", "gaps")),
    *(("f32", "bf16", "packed"), ("f32", "f16", "packed"), ("bf16", "f32", "reversed")),
    *(("bf16", "bf16", "gaps"), ("f16", "f32", "gaps"), ("f16", "f16", "reversed")),
]


def laid_out(values, field, order):
    """Data in a memory order; with gaps elements of a vector lie apart, too."""
    if order == "gaps" and field not in DATA:
        return np.repeat(values, 3, axis=-1)[..., ::3]
    return strided(values, order)


def arguments(name, dims=(4, 3, 5), data="f32", vectors="f32", order="packed", counts=None):
    """Arguments by CANN's names; NaN in outputs that are not read, and in rows of ranks without elements."""
    random = np.random.default_rng([len(name), *dims])
    vectors = "f32" if name == "stats" else vectors
    made = dict(FUNCTIONS[name][3])
    for field in FIELDS[name]:
        values = random.normal(0.5, 2, dims if field in DATA else dims[1])
        if field in ("invstd", "running_var"):
            values = random.uniform(0.3, 2, dims[1])
        if field in OUTPUTS[name] and "running" not in field:
            values = np.full_like(values, np.nan)
        made[field] = laid_out(values.astype(DTYPES[data if field in DATA else vectors]), field, order)
    if name == "gather_stats_with_counts":
        made["counts"] = counts or made["counts"]
        for field, low, high in (("mean", -2, 4), ("invstd", 0.3, 2)):
            rows = random.uniform(low, high, (len(made["counts"]), dims[1]))
            rows[np.equal(made["counts"], 0)] = np.nan
            made[field] = laid_out(rows.astype(DTYPES[vectors]), field, order)
    return made


def functions(name):
    """One call, and the first phase's size."""
    first = getattr(cann, f"batch_norm_{name}_get_workspace_size")
    return getattr(cann, name), lambda handle, **given: first(handle, **given)[0]


def phases(name):
    """Both phases as a call; each executor works once."""

    def call(handle, workspace, **given):
        size, executor = getattr(cann, f"batch_norm_{name}_get_workspace_size")(handle, **given)
        assert (size, executor.used) == (executor.workspace_size, False)
        getattr(cann, f"batch_norm_{name}")(*workspace, executor, None)
        assert executor.used
        with pytest.raises(pybnorm.ArgumentError, match="has been used") as caught:
            getattr(cann, f"batch_norm_{name}")(*workspace, executor, None)
        assert caught.value.argument == "executor"

    return call, functions(name)[1]


def right(name, a):
    """Results by CANN's names in float64."""
    x, dims = wide(a["input"]), a["input"].shape

    def column(field):
        return None if a[field] is None else wide(a[field]).reshape([-1 if i == 1 else 1 for i in range(len(dims))])

    if name == "stats":
        found = reference.stats(x, epsilon=a["eps"])
        return {"mean": found.mean, "invstd": found.inv_variance}
    if name == "gather_stats_with_counts":
        running = [None if a[n] is None else wide(a[n]) for n in ("running_mean", "running_var")]
        found = reference.gather_stats(
            wide(a["mean"]), None, [int(n) for n in a["counts"]], epsilon=a["eps"], running_mean=running[0],
            variances=np.nan_to_num(wide(a["invstd"]) ** -2 - a["eps"]), running_variance=running[1],
            exponential_average_factor=a["momentum"],
        )  # fmt: skip
        merged = {"mean_all": found.mean, "invstd_all": found.inv_variance}
        if a["running_mean"] is None:
            return merged
        return merged | {"running_mean": found.running_mean, "running_var": found.running_variance}
    mean, inv = column("mean"), column("invstd")
    if name == "elemt":
        return {"output": reference.elemt(x, column("weight"), column("bias"), mean, inv).y}
    given = {"x": x, "dy": wide(a["grad_out"]), "mean": mean, "inv_variance": inv}
    if name == "elemt_backward":
        sums = {n: column(n) for n in ("sum_dy", "sum_dy_xmu")}
        scale, count = column("weight"), sum(a["counter"])
        return {"grad_input": reference.backward_elemt(**given, **sums, scale=scale, count=count)}
    found = reference.backward_reduce(**given)
    return dict(zip(SUMS, (found.sum_dy, found.sum_dy_xmu, found.dscale, found.dbias), strict=True))


def check(bench, name, a, unwritten=()):
    """In two phases: what is written is right, all else stays as it was."""
    written = [n for n in OUTPUTS[name] if n not in unwritten and a[n] is not None]
    results, want = perform(bench, phases(name), a, written), right(name, a)
    assert set(results) == set(written)
    for field, got in results.items():
        near(got, want[field].reshape(got.shape), field)


@pytest.mark.parametrize("name", FUNCTIONS)
@table(("dims", "data", "vectors", "order"), [(DIMS[i % 8], *kind) for i, kind in enumerate(KINDS)])
def test_results_are_the_references(bench, name, dims, data, vectors, order):
    a = arguments(name, dims, data, vectors, order)
    check(bench, name, a)
    if FUNCTIONS[name][2]:
        check(bench, name, a | dict.fromkeys(FUNCTIONS[name][2].split()))


@table("counts", [[5], [5, 5, 5], [3, 60, 7], [0, 4, 0, 9], [0, 0, 6], [2.0, 3.0], array.array("i", [4, 1, 0])])
def test_counts_of_ranks(bench, counts):
    a = arguments("gather_stats_with_counts", counts=list(counts))
    a["counts"] = counts
    check(bench, "gather_stats_with_counts", a)


@pytest.mark.parametrize("vectors", ["f32", "bf16"])
def test_averages_in_place_of_sums(bench, vectors):
    """The old form: averages come out of `reduce_backward`, and into `elemt_backward`; the gradient is the same."""
    a, n, results = arguments("reduce_backward", (4, 3, 5, 2), "f32", vectors), 40, []
    read = {f: a[f] for f in FUNCTIONS["reduce_backward"][0].split()}
    for averages in (False, True):
        found = perform(bench, functions("reduce_backward"), a | {"averages": averages}, SUMS)
        second = read | {f: found[f] for f in SUMS[:2]} | {"counter": [n], "averages": averages}
        second["grad_input"] = np.full_like(a["input"], np.nan)
        found |= perform(bench, functions("elemt_backward"), second, ["grad_input"])
        results.append(found)
    sums, averages = results
    for field in SUMS[:2]:
        near(averages[field], wide(sums[field]) / n)
        assert not np.allclose(wide(averages[field]), wide(sums[field]), rtol=0.5)
    for field in (*SUMS[2:], "grad_input"):
        slack = 2.0**-7 if vectors == "bf16" else 1e-6
        assert np.allclose(wide(averages[field]), wide(sums[field]), rtol=slack, atol=10 * slack)
    with pytest.raises(pybnorm.ArgumentTypeError, match="averages"):
        cann.elemt_backward(bench.handle, **bench.put(second) | {"averages": "yes"})


@table("masks", list(itertools.product([False, True], repeat=3)))
@table("absent", [True, False])
def test_masks(bench, masks, absent):
    """What is masked off may be absent, or keeps its NaN."""
    a = arguments("reduce_backward") | dict(zip(("input_g", "weight_g", "bias_g"), masks, strict=True))
    off = [n for n, mask in MASKS.items() if not a[mask]]
    a |= dict.fromkeys(off) if absent else {}
    check(bench, "reduce_backward", a, off)
    assert any(masks) or functions("reduce_backward")[1](bench.handle, **bench.put(a)) == 0


@pytest.mark.parametrize("name", FUNCTIONS)
@table("dims", [(0, 3), (0, 3, 4), (2, 3, 0), (2, 3, 0, 4), (0, 3, 0, 4, 5)])
@table(("vectors", "order"), [("f32", "packed"), ("bf16", "gaps")])
def test_an_empty_batch_gives_zeros_or_nothing(bench, name, dims, vectors, order):
    a = arguments(name, dims, "f32", vectors, order)
    if name == "gather_stats_with_counts":  # input is not read
        return check(bench, name, a)
    for got in perform(bench, phases(name), a, OUTPUTS[name]).values():
        assert not wide(got).any()


# ---------------------------------------------------------------- the two phases and the one call


def prepared(bench, dims=(4, 3, 5)):
    """Arguments of `reduce_backward`, the same on the device, and the first phase's results."""
    a = arguments("reduce_backward", dims)
    placed = bench.put(a)
    return a, placed, *cann.batch_norm_reduce_backward_get_workspace_size(bench.handle, **placed)


def hold(bench, a, placed):
    for field, want in right("reduce_backward", a).items():
        near(bench.device.to_numpy(placed[field]), want.ravel(), field)


def test_one_call_is_the_two_phases(bench):
    a, placed, size, executor = prepared(bench)
    memory, address = bench.memory(size)
    assert executor.function == "batch_norm_reduce_backward"
    assert f"{size} bytes" in repr(executor)
    cann.batch_norm_reduce_backward(address, size, executor)
    assert "used" in repr(executor)
    again = bench.put(a)
    cann.reduce_backward(bench.handle, **again, workspace=(address, size))
    assert bench.intact(memory, address, size)
    for field in SUMS:
        one, other = (bench.device.to_numpy(p[field]).tobytes() for p in (placed, again))
        assert one == other
    hold(bench, a, placed)


def test_a_workspace_too_small_leaves_the_executor_usable(bench):
    a, placed, size, executor = prepared(bench)
    assert size > 0
    memory, address = bench.memory(size)
    array = memory._replace(pointer=address, dims=(size // 4 + 1,), strides=(1,))
    for given, argument, text in [
        ((address, size - 1), "workspace_size", f"at least {size} bytes"),
        ((address, 0), "workspace_size", f"at least {size} bytes"),
        ((0, size), "workspace", NULLPTR),
        ((None, size), "workspace", NULLPTR),
        ((address + 4, size), "workspace", "aligned to 64"),
        ((array, 4 * (size // 4 + 1) + 1), "workspace_size", "at most"),
    ]:
        with pytest.raises(pybnorm.WorkspaceError) as caught:
            cann.batch_norm_reduce_backward(*given, executor, None)
        assert caught.value.argument == argument
        assert text in str(caught.value)
        assert all(np.isnan(bench.device.to_numpy(placed[field])).all() for field in SUMS)
    cann.batch_norm_reduce_backward(array, size, executor, None)
    hold(bench, a, placed)


def test_an_executor_is_for_one_execution_of_its_own_function(bench):
    *_, size, executor = prepared(bench)
    _, address = bench.memory(size)
    with pytest.raises(pybnorm.ArgumentError, match=r"executor.*an executor of batch_norm_reduce_backward"):
        cann.batch_norm_stats(address, size, executor, None)
    for wrong, text in ((None, NULLPTR), (7, "an Executor")):
        with pytest.raises(pybnorm.ArgumentTypeError, match=f"executor.*{text}"):
            cann.batch_norm_reduce_backward(address, size, wrong, None)
    outcomes = []

    def execute():
        try:
            cann.batch_norm_reduce_backward(address, size, executor, None)
            outcomes.append("done")
        except pybnorm.ArgumentError as error:
            outcomes.append(error.argument)

    threads = [threading.Thread(target=execute) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["done"] + ["executor"] * 7


def test_the_given_stream_is_the_one_that_computes(bench, monkeypatch):
    *_, size, executor = prepared(bench)
    _, address = bench.memory(size)
    seen, execute = [], operations.program.Prepared.execute

    def spy(prepared, handle, operation, *rest):
        seen.append((operation, handle.stream))
        execute(prepared, handle, operation, *rest)

    monkeypatch.setattr(operations.program.Prepared, "execute", spy)
    before = bench.handle.stream
    with pytest.raises(pybnorm.ArgumentError, match="stream"):
        cann.batch_norm_reduce_backward(address, size, executor, "stream")
    assert not executor.used
    with pybnorm.Handle(bench.handle.backend) as other:
        cann.batch_norm_reduce_backward(address, size, executor, other.stream)
        bench.device.synchronize()
        assert seen == [("reduce_backward", other.stream)]
        assert bench.handle.stream == before


def test_the_executor_keeps_its_arrays_alive(bench):
    a, placed, size, executor = prepared(bench, (64, 8, 64))
    placed = {field: placed[field] for field in SUMS}
    gc.collect()
    _, address = bench.memory(size)
    noise = [bench.device.from_numpy(np.full((64, 8, 64), 1e30, np.float32)) for _ in range(8)]  # takes freed memory
    cann.batch_norm_reduce_backward(address, size, executor, None)
    hold(bench, a, placed)
    assert len(noise) == 8


# ---------------------------------------------------------------- bad input


def refused(bench, name, changes, argument, text, kind=pybnorm.ArgumentError):
    refuse(bench, functions(name), arguments(name) | changes, argument, text, kind)


@table(("name", "field"), EVERY)
def test_null(bench, name, field):
    if field not in FUNCTIONS[name][2].split():
        why = f"because {MASKS[field]} is True" if name == "reduce_backward" and field in SUMS else NULLPTR
        refused(bench, name, {field: None}, field, NULLPTR, pybnorm.ArgumentTypeError)
        refused(bench, name, {field: None}, field, why)
    elif "running" in field:
        refused(bench, name, {field: None}, field, "or both absent")


def test_what_is_masked_off_is_not_looked_at(bench):
    a = arguments("reduce_backward") | dict.fromkeys(("input_g", "weight_g"), False)
    check(bench, "reduce_backward", a | dict.fromkeys(SUMS[:3], "no array"), SUMS[:3])
    changes = {"sum_dy": "no array", "grad_weight": None, "weight_g": False}
    refused(bench, "reduce_backward", changes, "sum_dy", INVALID, pybnorm.ArgumentTypeError)


@table(("name", "field"), EVERY)
def test_fields(bench, name, field):
    """Dtype and shape of each; of data like the input's, of vectors its channels."""
    value, dims = np.ones_like(arguments(name)[field]), [(4,), (2,), (1, 3), (0,), ()]
    for kind in (np.float64, np.int32):
        refused(bench, name, {field: value.astype(kind)}, field, INVALID, pybnorm.ArgumentTypeError)
    if field in DATA[1:]:
        bf16 = value.astype(DTYPES["bf16"])
        refused(bench, name, {field: bf16}, field, "the dtype of input", pybnorm.ArgumentTypeError)
        dims = [(4, 3, 4), (4, 3, 5, 1), (4, 3)]
    elif field == "input":
        dims = [(), (3,), (1, 3) + (1,) * 7, (4, 0, 5), (4, 0)]
    if name == "stats" and field != "input":
        refused(bench, name, {field: value.astype(DTYPES["bf16"])}, field, INVALID, pybnorm.ArgumentTypeError)
    text = "the dims of input" if field in DATA[1:] else INVALID
    for wrong in dims:
        refused(bench, name, {field: np.ones(wrong, np.float32)}, field, text)


GATHER = "gather_stats_with_counts"
BAD_VALUES = [
    *[("reduce_backward", m, v, "True or False") for m in set(MASKS.values()) for v in (1, None, "True", 0.0)],
    *[(n, "eps", v, "a finite number >= 0") for n in ("stats", "elemt", GATHER)
      for v in (-1e-9, float("nan"), float("inf"), None, "0")],
    *[(GATHER, "momentum", v, "from 0 to 1") for v in (-0.1, 1.1, float("nan"), None)],
    *[(name, field, v, "whole numbers") for name, field in ((GATHER, "counts"), ("elemt_backward", "counter"))
      for v in ([1.5, 2], [-1, 2], [float("nan"), 2], [float("inf"), 2], ["1", 2], [True, 2], 20, "20")],
    (GATHER, "counts", None, NULLPTR),
    (GATHER, "counts", [20], "one for each of the 3 rows"),
    *[(GATHER, "counts", v, "a sum above 1") for v in ([0, 0, 0], [1, 0, 0])],
    ("elemt_backward", "counter", None, NULLPTR),
    ("elemt_backward", "counter", [0, 0], "a sum above 0"),
    *[(GATHER, f, np.ones(d, np.float32), INVALID) for f in ("mean", "invstd")
      for d in ((3,), (2, 4), (0, 3), (1, 2, 3))],
    *[(GATHER, f, None, NULLPTR) for f in ("mean", "invstd")],
    (GATHER, "invstd", np.ones((2, 3), np.float32), "the dims of mean"),
]  # fmt: skip


@table(("name", "field", "value", "text"), BAD_VALUES)
def test_other_values(bench, name, field, value, text):
    refused(bench, name, {field: value}, field, text)


def test_counts_are_on_the_host(bench):
    on_device = type("OnDevice", (), {"__cuda_array_interface__": None, "tolist": lambda self: [3, 0, 7]})()
    for name, field in ((GATHER, "counts"), ("elemt_backward", "counter")):
        refused(bench, name, {field: on_device}, field, "on the host")


@table(("name", "field"), [(n, f) for n in FUNCTIONS for f in OUTPUTS[n]])
def test_outputs_are_writable_and_have_memory_of_their_own(bench, name, field):
    placed = bench.put(arguments(name))
    refused(bench, name, {field: placed[field]._replace(writable=False)}, field, "read-only")
    for other in FIELDS[name]:
        if other != field and (other in DATA) == (field in DATA):
            refused(bench, name, {field: placed[other], other: placed[other]}, f"{field}|{other}", "overlaps")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_handle_is_named(bench, name):
    closed = pybnorm.Handle(bench.handle.backend)
    closed.close()
    for handle, kind in ((None, pybnorm.ArgumentTypeError), (closed, pybnorm.ClosedError)):
        with pytest.raises(kind, match="handle"):
            getattr(cann, name)(handle, **bench.put(arguments(name)))
