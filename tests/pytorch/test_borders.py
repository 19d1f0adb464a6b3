"""PyTorch's tensors in calls that have no gradients: what is refused at every call, and what autograd is told."""

import functools
import types

import numpy as np
import pytest

import pybnorm
from pybnorm import cann, directml, functional, graph, layer, miopen, operations, sync


def tensors(torch):
    x = torch.tensor([[0.0], [1.0], [3.0]])
    return x, torch.ones(1), torch.zeros(1)


CALLS = {
    "functional": lambda handle, x, one, zero: functional.batch_norm_training(x, one, zero),
    "handle": lambda handle, x, one, zero: handle.forward_training(x, one, zero, x.detach().clone()),
    "operations": lambda handle, x, one, zero: operations.axpby(handle, 1.0, x, 0.0, x.detach().clone()),
    "plan": lambda handle, x, one, zero: handle.plan_forward_inference(tensors_like(x))(
        x, one, zero, zero, one, x.detach().clone()
    ),
}


def tensors_like(x):
    return pybnorm.TensorDescriptor("native", "f32", tuple(x.shape), x.stride())


@pytest.fixture
def native():
    with pybnorm.Handle("native") as handle:
        yield handle


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_is_not_lost_and_a_negated_view_is_refused(torch, native, call, warm):
    """A view that is packed as any tensor: the sign is in no stride."""
    x, one, zero = tensors(torch)
    if warm:
        CALLS[call](native, x.clone(), one, zero)
    leaf = x.clone().requires_grad_()
    view = torch.complex(torch.tensor([0.0, 1.0, 3.0]), torch.ones(3)).conj().imag.as_strided((3, 1), (1, 1), 0)
    assert view.is_neg()
    for given, text in ((leaf, r"x: .*requires a gradient.*detach"), (view, "lazily negated")):
        with pytest.raises(pybnorm.ArgumentError, match=text):
            CALLS[call](native, given, one, zero)
    with torch.no_grad():
        CALLS[call](native, leaf, one, zero)


def writes(torch, handle):
    """Calls that write into a tensor of the caller, and that tensor."""
    x, one, zero = tensors(torch)
    out, running, mean, blended = torch.full((3, 1), 2.0), torch.ones(1), torch.zeros(1), torch.full((3, 1), 2.0)
    update = functools.partial(functional.batch_norm_training, running_mean=mean, running_variance=running)
    return {
        "out": (lambda: functional.batch_norm_training(x, one, zero, out=(out, None, None)), out),
        "running": (lambda: update(x * 9, one, zero), running),
        "handle": (lambda: handle.forward_training(x, one, zero, out), out),
        "backward": (lambda: handle.backward(x, x.clone(), one, out, torch.empty(1), torch.empty(1)), out),
        "operations": (lambda: operations.axpby(handle, 1.0, x, 1.0, blended), blended),
        "fill": (lambda: handle.fill(3.0, out), out),
        "saved": (lambda: functional.batch_norm_training(x, one, zero, out=(None, running, None)), running),
        "dscale": (lambda: handle.backward(x, x.clone(), one, out, running, torch.empty(1)), running),
        "miopen": (lambda: miopen_call(torch, handle, x, one, zero, out), out),
        "graph": (lambda: graph_call(handle, x, out), out),
        **roads_with_memory(torch, handle, x, one, zero),
    }


def roads_with_memory(torch, handle, x, one, zero):
    """What has a workspace of the caller's, or writes by the calls of other objects."""
    out, mean, space = torch.full((3, 1), 2.0), torch.zeros(1), torch.full((1 << 14,), 2, dtype=torch.uint8)
    reserve = torch.full((1 << 14,), 2, dtype=torch.uint8)
    inference = handle.plan_forward_inference(tensors_like(x))
    training = handle.plan_forward_training(tensors_like(x))
    synchronized = sync.SyncBatchNorm(handle, mirror(torch), 1)
    staged = layer.BatchNorm.spatial(handle)
    staged.stage(x)
    free = torch.empty(3, 1), torch.empty(1)

    def differentiated():
        synchronized.forward(x, one, zero, torch.empty(3, 1), saved_mean=free[1], saved_inv_variance=one.clone())
        synchronized.backward(x, x.clone(), one, out, mean, torch.empty(1), saved_mean=free[1], saved_inv_variance=one)

    def executed():
        _, executor = cann.batch_norm_stats_get_workspace_size(handle, x, 0.0, mean, free[1])
        cann.batch_norm_stats(space, space.nbytes, executor, 0)

    return {
        "plan": (lambda: inference(x, one, zero, zero, one, out), out),
        "plan's statistics": (lambda: training(x, one, zero, free[0], mean, one.clone(), free[1], one.clone()), mean),
        "workspace": (lambda: handle.axpby(1.0, x, 0.0, free[0], workspace=space), space),
        "plan's workspace": (lambda: inference(x, one, zero, zero, one, free[0], workspace=space), space),
        "reserve": (
            lambda: training(x, one, zero, free[0], mean, one.clone(), free[1], one.clone(), reserve=reserve),
            reserve,
        ),
        "sync": (lambda: synchronized.forward(x, one, zero, out), out),
        "sync's statistics": (
            lambda: synchronized.forward(x, one, zero, free[0], running_mean=mean, running_variance=one.clone()),
            mean,
        ),
        "sync backward": (differentiated, out),
        "sync dscale": (differentiated, mean),
        "sync's workspace": (lambda: synchronized.forward(x, one, zero, free[0], workspace=space), space),
        "layer": (lambda: staged.forward_training(x, one, zero, out), out),
        "cann": (executed, mean),
        "cann's workspace": (executed, space),
        "directml": (
            lambda: directml.batch_normalization(
                handle, *(t.view(-1, 1, 1, 1) for t in (x, zero, one, one, zero, out))
            ),
            out,
        ),
    }


def mirror(torch):
    """A communicator of two ranks, of which the other does the same."""
    return types.SimpleNamespace(
        rank=0,
        size=2,
        devices=(1,),
        vector=lambda values, *_: torch.from_numpy(values.copy()),
        all_gather=lambda send, received, _: received.view(2, -1).copy_(send),
        all_reduce=lambda send, received, _: received.copy_(2 * send),
        read=lambda vector, out, _: np.copyto(out, vector.numpy().reshape(out.shape)),
    )


def miopen_call(torch, handle, x, one, zero, y):
    data = pybnorm.TensorDescriptor("native", "f32", (3, 1))
    derived = pybnorm.derive_bn_tensor_descriptor(data, 1)
    miopen.batch_normalization_forward_inference(
        handle, 1, 1.0, 0.0, data, x, data, y, derived, one, zero, zero, one, 1e-5
    )


def graph_call(handle, x, y):
    made = graph.Graph().set_io_data_type("float").set_intermediate_data_type("float").set_compute_data_type("float")
    source = made.tensor(name="x", dim=(3, 1, 1, 1), stride=(1, 1, 1, 1), data_type="float")
    result = made.relu(source).set_output(True)
    made.build(handle)
    made.execute(handle, {source: x.view(3, 1, 1, 1), result: y.view(3, 1, 1, 1)})


def test_a_write_is_seen_by_autograd(torch, native):
    for name, (call, target) in writes(torch, native).items():
        call()  # cold
        for _ in range(2):
            leaf = torch.ones(target.shape, requires_grad=True)
            saved = (leaf * target).sum()
            call()
            try:
                saved.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error), name
            else:
                raise AssertionError(f"{name} writes in secret")


def test_what_is_read_stays_as_it_is(torch, native):
    x, one, zero = tensors(torch)
    leaf = torch.ones(3, 1, requires_grad=True)
    saved = (leaf * x).sum()
    functional.batch_norm_training(x, one, zero)
    native.forward_training(x, one, zero, torch.empty(3, 1))
    saved.backward()
    np.testing.assert_array_equal(leaf.grad.tolist(), x.tolist())


def test_tensors_of_inference_mode_are_written(torch, native):
    with torch.inference_mode():
        x, one, zero = tensors(torch)
        y = torch.empty_like(x)
        native.forward_training(x, one, zero, y)
        assert abs(float(y.mean())) < 1e-6
