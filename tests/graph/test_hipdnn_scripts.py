"""Scripts of hipDNN's own Python run with the import changed, and compute what the reference says."""

from pathlib import Path

import numpy as np
import pytest

from pybnorm import hipdnn, reference
from pybnorm.hipdnn import handles

SCRIPTS = Path(__file__).parent / "hipdnn_scripts"
THEIRS, OURS = "import hipdnn_frontend as hipdnn\n", "import pybnorm.hipdnn as hipdnn\n"


@pytest.fixture
def script(handle, monkeypatch):
    """Runs a script on the backend under test; its names."""
    monkeypatch.setattr(handles, "_ORDER", (handle.backend,))

    def run(name):
        path = SCRIPTS / f"{name}.py"
        text = path.read_text()
        assert text.count(THEIRS) == text.count("hipdnn_frontend") == 1
        made = {"__name__": "__main__"}
        exec(compile(text.replace(THEIRS, OURS), str(path), "exec"), made)
        assert made["hipdnn"] is hipdnn
        return made

    return run


def wide(array):
    return np.asarray(array, np.float64)


def close(results, expected):
    assert set(results) == set(expected)
    for name, right in expected.items():
        np.testing.assert_allclose(
            wide(results[name]).reshape(-1), wide(right).reshape(-1), rtol=1e-3, atol=1e-4, err_msg=name
        )


def test_training(script):
    made = script("training")
    given = {name: wide(array) for name, array in made["inputs"].items()}
    x, m = given["x"], given["x"].size // given["x"].shape[1]
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    inverse = 1 / np.sqrt(variance + float(np.float32(1e-3)))
    after = []
    for before, batch in ((given["running_mean"], mean), (given["running_variance"], variance * m / (m - 1))):
        once = 0.75 * before + 0.25 * batch
        after.append(0.75 * once + 0.25 * batch)
    close(
        made["results"],
        {
            "y": given["scale"] * (x - mean) * inverse + given["bias"],
            "mean": mean,
            "inv_variance": inverse,
            "next_running_mean": after[0],
            "next_running_variance": after[1],
        },
    )


def test_inference(script):
    made = script("inference")
    x, residual, mean, variance, scale, bias = map(wide, made["inputs"])
    y = np.maximum(scale * (x - mean) / np.sqrt(variance + 1e-5) + bias + residual, 0)
    got = wide(made["results"]["y"])
    np.testing.assert_allclose(got, y, rtol=4e-3, atol=4e-3)
    assert 0.1 < np.mean(got == 0) < 0.9


def test_backward_through_an_activation(script):
    made = script("backward")
    given = {name: wide(array) for name, array in made["inputs"].items()}
    y = given["scale"] * (given["x"] - given["mean"]) * given["inv_variance"] + given["bias"]
    masked = np.where(y > 0, given["dy"], 0)
    flat = {name: given[name].reshape(-1) for name in ("scale", "mean", "inv_variance")}
    dx, dscale, dbias = reference.backward(
        given["x"], masked, flat["scale"], saved_mean=flat["mean"], saved_inv_variance=flat["inv_variance"]
    )
    close(made["results"], {"dx": dx, "dscale": dscale, "dbias": dbias})
