"""What the README shows runs as it is written."""

import contextlib
import re
from pathlib import Path

import pytest

import pybnorm

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL) if README.is_file() else []
GPU = "torch.empty"  # in the block of fused plans, which tests/backends/test_fused.py runs on a GPU
CUDNN = 'TensorDescriptor("cudnn"'
MODEL = "pybnorm.torch.convert"  # tests/pytorch has it
FUNCTIONAL = "functional.batch_norm_training"


def test_there_are_blocks_of_every_kind():
    if not BLOCKS:
        pytest.skip("the README is not beside the tests")
    assert sum(GPU in block for block in BLOCKS) == sum(CUDNN in block for block in BLOCKS) == 1
    assert len(BLOCKS) >= 5


def test_the_python_blocks_run_one_after_another(load_library, tmp_path, monkeypatch, capsys):
    if not BLOCKS:
        pytest.skip("the README is not beside the tests")
    load_library("onednn")
    monkeypatch.setenv("PYBNORM_TUNE_CACHE", str(tmp_path / "tuning.json"))
    try:
        pybnorm.load("cudnn")
        left_out = (GPU,)
    except pybnorm.LibraryError:
        left_out = (GPU, CUDNN)
    names = {}
    apart = {}  # its arrays have the names of others
    for block in BLOCKS:
        if not any(word in block for word in (*left_out, MODEL)):
            exec(compile(block, "README.md", "exec"), apart if FUNCTIONAL in block else names)
    assert apart["y"].shape == apart["dx"].shape == (8, 64, 32, 32)
    assert abs(apart["saved_mean"] - apart["x"].mean((0, 2, 3))).max() < 1e-5
    with contextlib.closing(names["handle"]):
        assert names["y"].std() == pytest.approx(1, abs=1e-3)
        assert abs(names["saved_mean"] - names["x"].mean((0, 2, 3))).max() < 1e-5
    printed = capsys.readouterr().out
    assert any(reason in printed for reason in ("the one entry point of this backend", "over channels-first memory"))
