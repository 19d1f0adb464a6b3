"""``pybnorm bench model`` in its smallest size, on the CPU; and which backend ``bench device`` takes by itself."""

import json
import re
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

import pybnorm
from pybnorm import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(need_package, monkeypatch):
    torch = need_package("torch")
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield pytest.importorskip("benchmarks.model")
    torch.set_num_threads(threads)


def invoke(*arguments):
    return CliRunner().invoke(cli.main, ["bench", "model", "--quick", "--setting", "small-f32-nchw", *arguments])


def test_every_contender_makes_the_steps_of_pytorch(model, need_device, tmp_path):
    need_device("onednn")
    done = invoke("--json", str(tmp_path / "model.json"))
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert set(row["contenders"]) == set(model.CONTENDERS)
    installed = row["contenders"]["installed"]
    if "unsupported" in installed:
        assert "2.10" in row["contenders"].pop("installed")["unsupported"]
    else:
        assert installed["left"] == 0
    for found in row["contenders"].values():
        assert found["seconds"] > 0
        assert found["loss"] == pytest.approx(row["contenders"]["torch"]["loss"], rel=2e-3)


def test_installed_is_of_its_own_steps_alone(model, need_device, monkeypatch):
    """And calls that PyTorch's kernels computed all the same are told."""
    need_device("onednn")
    import torch

    import pybnorm.torch

    if model._unsupported(torch, "cpu", model.SETTINGS["small-f32-nchw"]):
        pytest.skip(f"install() has no kernels for PyTorch {torch.__version__}")
    pybnorm.functional._local.ready.clear()
    real, within, steps = pybnorm.torch.install, [], []

    def install(**options):
        monkeypatch.setattr(pybnorm.torch.installation._Host, "plan", lambda *given: None)
        made = real(**options)
        within.append(made)
        return made

    def step(*given):
        call = made(*given)
        return lambda: steps.append(bool(pybnorm.torch.installation._installed)) or call()

    made = model._step
    monkeypatch.setattr(pybnorm.torch, "install", install)
    monkeypatch.setattr(model, "_step", step)
    done = invoke("--contender", "installed")
    assert done.exit_code == 0, done.output
    assert steps == [False, True] * 4  # the first step, one that is not counted, and two rounds
    assert len(within) == 4
    assert "34 calls left to PyTorch" in done.output
    assert not pybnorm.torch.installation._installed
    pybnorm.functional._local.ready.clear()


def test_what_is_not_measured_says_why(model, need_package):
    torch = need_package("torch")
    (compiled, *_) = [setting for setting in model.SETTINGS.values() if setting.compiled]
    plain = compiled._replace(compiled="")
    result = model._row(torch, "cpu", compiled._replace(batch=2, size=32), ("installed",), True)
    assert list(result["contenders"]["installed"]) == ["unsupported"]
    shown = model.render({"device": "cpu", "torch": "2", "model": "none", "rows": [result], "left_out": []})
    assert "installed: n/s, " in shown

    class Old:
        __version__ = "2.9.1+cpu"

    assert "2.10" in model._unsupported(Old, "cpu", plain)
    if model._unsupported(torch, "cpu", plain) is None:
        assert "torch.compile" in model._unsupported(torch, "cpu", compiled)


@pytest.mark.parametrize("failure", ["the loss is", "AssertionError", "RuntimeError: AssertionError"])
def test_a_failure_is_told_with_its_place(model, need_device, monkeypatch, failure):
    """Also one that says nothing by itself."""
    need_device("onednn")
    import pybnorm.torch

    real = pybnorm.torch.convert

    def compiler(network, **options):
        if failure == "the loss is":
            network[1].eps = 10.0
            return real(network, **options)
        try:
            raise AssertionError
        except AssertionError as error:
            if failure == "AssertionError":
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}\n\nSet TORCHDYNAMO_VERBOSE=1") from error

    monkeypatch.setattr(pybnorm.torch, "convert", compiler)
    done = invoke("--contender", "fused")
    place = r": at bench/test_bench_model\.py:\d+ in compiler: raise AssertionError"
    said = "ArithmeticError: the loss is" if failure == "the loss is" else failure + place
    assert done.exit_code == 1, done.output
    assert re.search(f"fused: {said}", done.output), done.output


def test_a_name_that_is_none_is_refused(model):
    for option, value, said in (
        ("--contender", "jax", "contenders: got jax"),
        ("--setting", "huge", "names: got huge"),
    ):
        done = invoke(option, value)
        assert (done.exit_code, said in done.output) == (2, True), done.output


def test_the_device_bench_takes_the_backend_that_is_here(monkeypatch):
    monkeypatch.chdir(ROOT)
    device = pytest.importorskip("benchmarks.device")
    assert device.BACKENDS
    asked, present = [], set()

    def opened(name):
        asked.append(name)
        if name not in present:
            raise pybnorm.NotInitializedError(backend=name, function="create", status=1, status_name="none")
        return types.SimpleNamespace(close=print)

    monkeypatch.setattr(pybnorm, "Handle", opened)
    for names, right in ((("cudnn", "onednn"), "cudnn"), (("onednn",), "onednn")):
        asked.clear()
        present.clear()
        present.update(names)
        assert device.here() == right
        assert asked[0] == "cudnn"
    present.clear()
    with pytest.raises(pybnorm.NotInitializedError):
        device.here()
