"""An installation of cuDNN for graphs, libcudnn_graph without libcudnn_ops: what runs, and what says why it does not.

The installation is a double that writes down what reaches it; NVIDIA's own is in test_loading_processes.py.
"""

from __future__ import annotations

from typing import Any


def test_graphs_run_and_all_else_says_why_not(run: Any, graphs_only: str) -> None:
    answer = run(
        """
        first = pybnorm.TensorDescriptor("cudnn", "f32", (2, 8, 3, 5))
        channels_last, answer = last((2, 8, 3, 5)), {"plans": [], "refused": {}}
        with pybnorm.Handle("cudnn") as handle:
            for x in (channels_last, first):
                plan = handle.plan_forward_training(x)
                plan(**FORWARD)
                answer["plans"].append([plan.algorithm, plan.reason])
                plan = handle.plan_backward(x)
                arguments = {n: v for n, v in BACKWARD.items() if n not in ("y", "bias")}
                plan(**arguments)
                answer["plans"].append([plan.algorithm, plan.reason])
            plan = handle.plan_forward_inference(channels_last)
            plan(**{n: v for n, v in FORWARD.items() if not n.startswith("saved")})
            answer["plans"].append([plan.algorithm, plan.reason])
            answer["log"] = taken()
            for name, call in {
                "entry point": lambda: handle.plan_forward_training(first, algorithm=None),
                "spatial": lambda: handle.plan_forward_training(first, algorithm="spatial"),
                "inference": lambda: handle.plan_forward_inference(first),
                "per activation": lambda: handle.plan_backward(first, mode="per_activation"),
                "blended": lambda: handle.plan_backward(channels_last, alpha=2.0),
                "borrowed": lambda: pybnorm.TensorDescriptor.from_pointer("cudnn", 0x1000),
                "workspace": lambda: handle.workspace_size("train", first),
                "copy": lambda: handle.workspace_size("axpby", first),
            }.items():
                answer["refused"][name] = attempt(call)
            answer["candidates"] = pybnorm._core.candidates(handle.plan_forward_training(channels_last), True)
        report(answer)
        """,
        file=graphs_only,
    )
    assert [name for name, _ in answer["plans"]] == ["graph"] * 4 + ["pointwise"]
    assert all("libcudnn_ops" in reason or "table" in reason for _, reason in answer["plans"])
    assert sum(line.startswith("graph") or "execute" in line for line in answer["log"]) >= 5, answer["log"]
    for name, seen in answer["refused"].items():
        assert seen.get("error") == "UnsupportedError", (name, seen)
        assert "libcudnn_ops" in seen["text"] or name in ("copy", "blended"), (name, seen)
    assert answer["candidates"]
    assert {name.partition(":")[0] for name in answer["candidates"]} == {"graph"}


def test_a_single_symbol_that_is_missing_is_no_installation_for_graphs(child: Any, doubles: Any) -> None:
    library = doubles.build("cudnn", without=["cudnnBatchNormalizationBackward"])
    answer = child('import pybnorm; report(attempt(lambda: pybnorm.load("cudnn", values["file"])))', file=library)
    assert answer["error"] == "SymbolNotFoundError"
    assert "symbol cudnnBatchNormalizationBackward is missing" in answer["text"]
