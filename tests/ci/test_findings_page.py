"""The page of findings says what a run found, the wrong first, and nothing of what passed."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "ci" / "findings-page.py"


def case(line, status, **ratios):
    verdicts = [{"output": name, "status": status, "ratio": ratio} for name, ratio in ratios.items()]
    return {"case": line, "status": status, "verdicts": verdicts, "repro": f"pybnorm check --case '{line}'"}


def test_a_run_becomes_a_table_of_its_findings():
    spec = importlib.util.spec_from_file_location("findings_page", FILE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    backward = "backward,spatial,bf16,strides=300x90x18x3,2x3x4x5"
    run = {
        "backends": [{"label": "Frame", "version": [1, 2], "device": "CPU"}],
        "environment": {"date": "2026-11-26T23:00:00+00:00"},
        "cases": [
            case("train,spatial,f32,nchw,8x4x5x5", "PASS", y=0.5),
            case("train,spatial,f32,nhwc,8x4x5x5,fill=level", "CHAIN", y=11.0),
            case(backward, "FAIL", dx=1.5),
            case(f"{backward},fill=ramp", "FAIL", dx=1.2, dbias="inf"),
        ],
    }
    text = page.section(run)
    assert "2 FAIL, 1 PASS, 1 CHAIN; 2026-11-26." in text
    wrong, chain = [row for row in text.splitlines() if row.startswith(("| back", "| train"))]
    assert wrong == (
        "| backward | bf16 | strides | 4 | FAIL | 2 | dx 1.5, dbias inf "
        f"| `pybnorm check --case '{backward},fill=ramp'` |"
    )
    assert chain.startswith("| train | f32 | nhwc | 4 | CHAIN | 1 | y 11 |")
    assert page.section(run | {"cases": run["cases"][:1]}).endswith("Nothing.\n")
