"""``pybnorm bench model`` in its smallest size, on the CPU; and which backend ``bench device`` takes by itself."""

import json
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
    for found in row["contenders"].values():
        assert found["seconds"] > 0
        assert found["loss"] == pytest.approx(row["contenders"]["torch"]["loss"], rel=2e-3)


def test_a_wrong_loss_is_told(model, need_device, monkeypatch):
    need_device("onednn")
    import pybnorm.torch

    real = pybnorm.torch.convert

    def wrong(network, **options):
        network[1].eps = 10.0
        return real(network, **options)

    monkeypatch.setattr(pybnorm.torch, "convert", wrong)
    done = invoke("--contender", "fused")
    assert (done.exit_code, "fused: ArithmeticError: the loss is" in done.output) == (1, True), done.output


def test_a_name_that_is_none_is_refused(model):
    for arguments, said in (
        (("--contender", "jax"), "contenders: got jax"),
        (("--setting", "huge"), "names: got huge"),
    ):
        done = invoke(*arguments)
        assert (done.exit_code, said in done.output) == (2, True), done.output


def test_the_device_bench_takes_the_backend_that_is_here(monkeypatch):
    monkeypatch.chdir(ROOT)
    device = pytest.importorskip("benchmarks.device")
    assert device.BACKENDS
    asked, present = [], set()

    class Handle:
        def __init__(self, name):
            asked.append(name)
            if name not in present:
                raise pybnorm.NotInitializedError(backend=name, function="create", status=1, status_name="none")

        def close(self):
            pass

    monkeypatch.setattr(pybnorm, "Handle", Handle)
    for names, right in ((("cudnn", "onednn"), "cudnn"), (("onednn",), "onednn")):
        asked.clear()
        present.clear()
        present.update(names)
        assert device.here() == right
        assert asked[0] == "cudnn"
    present.clear()
    with pytest.raises(pybnorm.NotInitializedError):
        device.here()
