"""Objects that were never made, lie about themselves, or are no arrays: refused, never a crash, on oneDNN."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OURS = ("ArgumentError: ", "ArgumentTypeError: ", "ClosedError: ", "WorkspaceError: ")
PASSIVE = (  # what says of itself that nothing is there, or does nothing
    "__del__", "__exit__", "__hash__", "__repr__", "_no_addresses", "_prepared", "_ready", "algorithm", "backend",
    "close", "closed", "device", "dims", "dtype", "layout", "library", "reason", "reserve_size", "strides",
    "workspace_nbytes",
)  # fmt: skip


@pytest.fixture(scope="module")
def told(need_device, tmp_path_factory):
    """What the worker's attempts ended in."""
    need_device("onednn")
    worker = Path(__file__).with_name("hostile_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker)], cwd=tmp_path_factory.mktemp("hostile"), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.stderr == ""
    return json.loads(done.stdout)


def refused(told, text, names):
    """Every attempt whose name contains the text ended in one of our errors that names an argument."""
    found = {name: said for name, said in told.items() if text in name}
    assert found
    wrong = {
        name: said
        for name, said in found.items()
        if not said.startswith(OURS) or not any(f": {argument}: got " in said for argument in names)
    }
    assert wrong == {}


def test_a_handle_that_was_never_made_is_refused_by_every_method(told):
    for name, said in told.items():
        kind, _, member = name.partition(".")
        if kind in ("Handle", "NoHandle") and member not in PASSIVE:  # workspace_size is a handle's method
            assert said.startswith("ClosedError: handle"), (name, said)
    refused(told, "of a handle never made", ("handle",))
    refused(told, "on a handle never made", ("handle",))


def test_descriptors_and_plans_that_were_never_made_are_refused(told):
    kinds = ("TensorDescriptor", "NoDescriptor", "ForwardTrainingPlan", "ForwardInferencePlan", "BackwardPlan",
             "NoPlan", "Plan")  # fmt: skip
    tried = {name: said for name, said in told.items() if name.partition(".")[0] in kinds}
    assert len(tried) > 50
    for name, said in tried.items():
        assert name.partition(".")[2] in (*PASSIVE, "workspace_size") or said.startswith("ClosedError: "), (name, said)
    refused(told, "of a descriptor never made", ("x_desc", "x"))


def test_none_for_a_tensor_is_refused_by_the_plans(told):
    refused(told, "plan_forward_training(None)", ("x",))
    refused(told, "plan_forward_inference(None)", ("x",))
    refused(told, "plan_backward(None)", ("x",))


def test_a_call_list_is_given_what_its_calls_need(told):
    tried = {name: said for name, said in told.items() if name.startswith("CallList")}
    assert len(tried) == 17
    for name, said in tried.items():
        assert said.startswith(("TypeError: ", "ValueError: ", "KeyError: ")), (name, said)


def test_functional_takes_no_address_for_an_array(told):
    refused(told, "training argument", ("x", "scale", "bias", "running_mean", "running_variance"))
    refused(told, "inference argument", ("x", "scale", "bias", "mean", "variance"))
    refused(told, "backward argument", ("x", "dy", "scale", "saved_mean", "saved_inv_variance"))
    for operation in ("training", "inference", "backward"):
        refused(told, f"{operation} out", ("out", "out[0]", "out[1]", "out[2]"))
    assert told["bystander"] == "untouched"


@pytest.mark.parametrize(
    "lie",
    ["shape NULL", "ndim 2**30", "ndim -1", "ndim 65", "data NULL with", "data NULL,", "negative", "an address past"],
)
def test_a_tensor_of_dlpack_that_lies_is_refused(told, lie):
    refused(told, lie, ("x", "y", "workspace"))


def test_an_array_of_references_to_objects_is_no_workspace(told):
    refused(told, "object", ("workspace", "reserve"))
    refused(told, "structure", ("workspace", "reserve"))
