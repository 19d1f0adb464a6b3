"""The gallery: one short script per way to call, each with what it prints."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_here import EXAMPLES, run_here
from tables import table

GALLERY = sorted(file.stem for pattern in ("call_*.py", "check_*.py") for file in EXAMPLES.glob(pattern))
PACKAGES = {"call_torch": "torch", "call_cupy": "cupy", "call_sync": "mpi4py"}
SHOWS = {
    "call_addresses": r"dscale (\d+) is the sum of y squared, \1\n",
    "call_cupy": r"float16 \(32, 64, 28, 28\), standard deviation 1\.000",
    "call_functional": r"mean 0\.000, standard deviation 1\.000(.*\n)+channels last: strides \(12544, 4, 896, 64\)",
    "call_graph": r"saved: 3\.0\d; values below 0 after the ReLU: 0\n",
    "call_handle": r"mean 1\.000 \(the bias\) .* 2\.000 \(the scale\)\n.*dbias 1568 .*e-0[5-9] \(none\)",
    "call_layer": r"running mean (2\.9|3\.0)\d, variance (3\.9|4\.0)\d",
    "call_miopen": r"mean (2\.9|3\.0)\d, variance (3\.9|4\.0)\d",
    "call_operations": r"y: mean 1\.000, standard deviation 1\.000\n.*e-0[6-9]\n196 places",
    "call_plan": r"onednn: plain(.*\n)*native: plain(.*\n)*y has mean 1\.000 ",
    "call_sync": r"rank 1: 5 of 9 images, 1764 values per channel; .* y differs by \de-0[6-9]",
    "call_torch": r"loss after five steps: (\S{6}).*\nloss after five steps: \1",
    "check_library": r"\{'PASS': 12\}\n.*miopen-backward",
    "check_own_kernel": r"good: PASS, 0\.\d+ (.*\n)+careless: FAIL, .*\n.*at \(7, 15, 13, 13\)",
}


@table("name", GALLERY)
def test_is_short_and_stands_alone(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 40
    tree = ast.parse(text)
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {i.partition(".")[0] for i in imported} & {file.stem for file in EXAMPLES.glob("*.py")}
    command = f"python examples/{name}.py"
    assert command in ast.get_docstring(tree)


def test_the_page_has_each():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert sorted(re.findall(r"examples/(\w+)\.py\n", page)) == GALLERY


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_shows_what_it_says(name, need_device, need_package):
    need_device("cudnn" if name == "call_cupy" else "onednn")
    if name in PACKAGES:
        need_package(PACKAGES[name])
    result = two_ranks(name) if name == "call_sync" else run_here(name)
    assert result.returncode == 0, result.stderr
    assert re.search(SHOWS[name], result.stdout), result.stdout


def two_ranks(name):
    launcher = Path(sys.executable).with_name("mpiexec")
    if not launcher.exists():
        pytest.skip("no mpiexec beside this Python: the package mpich is not installed")
    command = [str(launcher), "-n", "2", sys.executable, str(EXAMPLES / f"{name}.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
