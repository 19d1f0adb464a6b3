"""A script in hipDNN's own Python runs with the import changed, and computes what the reference says."""

from pathlib import Path

import numpy as np

from pybnorm import hipdnn, reference

SCRIPT = Path(__file__).parent / "hipdnn_script.py"
THEIRS, OURS = "import hipdnn_frontend as hipdnn\n", "import pybnorm.hipdnn as hipdnn\n"


def close(results, expected, tolerance=1e-3):
    assert set(results) == set(expected)
    for name, right in expected.items():
        got = results[name].astype(np.float64).reshape(-1)
        np.testing.assert_allclose(got, np.ravel(right), rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_script_runs(handle, monkeypatch):
    monkeypatch.setattr(hipdnn, "_ORDER", (handle.backend,))
    text = SCRIPT.read_text()
    assert text.count(THEIRS) == text.count("hipdnn_frontend") == 1
    made = {"__name__": "__main__"}
    exec(compile(text.replace(THEIRS, OURS), str(SCRIPT), "exec"), made)
    assert made["hipdnn"] is hipdnn

    def part(name):
        given, results = made[name]
        return {n: array.astype(np.float64) for n, array in given.items()}, results

    given, results = part("training")
    x, m = given["x"], given["x"].size // given["x"].shape[1]
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    inverse = 1 / np.sqrt(variance + 1e-3)
    right = {"y": given["scale"] * (x - mean) * inverse + given["bias"], "mean": mean, "inv_variance": inverse}
    for name, batch in (("running_mean", mean), ("running_variance", variance * m / (m - 1))):
        right[f"next_{name}"] = 0.75 * (0.75 * given[name] + 0.25 * batch) + 0.25 * batch  # two batches
    close(results, right)

    given, results = part("inference")
    y = given["scale"] * (given["x"] - given["mean"]) / np.sqrt(np.abs(given["variance"]) + 1e-5) + given["bias"]
    y = np.maximum(y + given["residual"], 0)
    close({"y": results["y"] / (1 + y)}, {"y": y / (1 + y)}, 4e-3)
    assert 0.1 < np.mean(results["y"] == 0) < 0.9

    given, results = part("backward")
    y = given["scale"] * (given["x"] - given["mean"]) * given["inv_variance"] + given["bias"]
    vectors = {name: given[name].reshape(-1) for name in ("scale", "mean", "inv_variance")}
    found = reference.backward(
        given["x"], np.where(y > 0, given["dy"], 0), vectors["scale"], saved_mean=vectors["mean"],
        saved_inv_variance=vectors["inv_variance"],
    )  # fmt: skip
    close(results, dict(zip(("dx", "dscale", "dbias"), found, strict=True)))
