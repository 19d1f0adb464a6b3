"""A run as JUnit XML, which CI systems show as a list of tests.

One ``testsuite`` per backend, or per library if nodes had several of one backend. One ``testcase`` per case:
``classname`` is backend.operation, ``name`` the problem's line. What was judged wrong is a ``failure``, what could not
be judged an ``error``, a refusal ``skipped``; a WARN, a CHAIN, a MISTRUSTED and an allowed defect have passed and say
why in ``system-out``. A library that did not run is a suite with one case: skipped, or an error if it was asked for.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import IO, Any

from pybnorm._text import write_visible
from pybnorm.check.judging.bounds import Status, Verdict
from pybnorm.check.judging.results import (
    NO_VERDICT,
    BackendInfo,
    CaseResult,
    cell_text,
    label,
    point_cells,
    repro,
    verdict_text,
    version_text,
)

_ELEMENTS = {
    Status.UNSUPPORTED: "skipped",
    **dict.fromkeys((Status.INCONCLUSIVE, Status.NONDETERMINISTIC, Status.FAIL), "failure"),
    **dict.fromkeys(NO_VERDICT, "error"),
}
"""PASS, WARN, CHAIN and MISTRUSTED have none."""


def write(
    target: str | os.PathLike[str] | IO[str],
    environment: dict[str, Any],
    backends: Sequence[BackendInfo],
    results: Sequence[CaseResult],
    missing: Sequence[str] = (),
) -> None:
    """Write the run; `environment` is `pybnorm.check.run.environment.machine`, `missing` had to run and could not."""
    root = ET.Element("testsuites", name="pybnorm check")
    known = {(info.backend, info.id) for info in backends}
    for info in backends:
        first = info is next(i for i in backends if i.backend == info.backend)
        own = [r for r in results if r.backend == info.backend]
        own = [r for r in own if r.library == info.id or (first and (r.backend, r.library) not in known)]
        root.append(_suite(environment, info, label(info, backends), own, missing))
    for name in ("tests", "failures", "errors"):  # the schema that Jenkins reads by has no other
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(r.seconds for r in results):.3f}")
    ET.indent(root)
    write_visible(target, '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n")


def _suite(
    environment: dict[str, Any], info: BackendInfo, name: str, results: list[CaseResult], missing: Sequence[str]
) -> ET.Element:
    suite = ET.Element("testsuite", name=f"pybnorm.{name}", timestamp=str(environment.get("date", "")))
    suite.set("hostname", str(environment.get("host", "")))
    properties = ET.SubElement(suite, "properties")
    versions = {n: environment[n] for n in ("pybnorm", "python", "numpy", "platform", "cpu") if n in environment}
    library = {"library": info.label, "version": version_text(info), "path": info.path}
    library |= {"device": info.device, "driver": info.driver, "digest": info.digest} | info.variables
    for fact, value in (versions | library | environment.get("drivers", {})).items():
        ET.SubElement(properties, "property", name=fact, value=str(value))
    cases = [_case(result) for result in results]
    if info.problem and not results:
        cases = [_absent(info, missing)]
    suite.extend(cases)
    suite.set("tests", str(len(cases)))
    for count, element in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(element) is not None for case in cases)))
    suite.set("time", f"{sum(r.seconds for r in results):.3f}")
    return suite


def _case(result: CaseResult) -> ET.Element:
    operation = result.case.partition(",")[0]
    case = ET.Element(
        "testcase", classname=f"{result.backend}.{operation}", name=result.case, time=f"{result.seconds:.3f}"
    )
    lines = [result.message] if result.message else []
    lines += [f"known defect{', allowed' if result.allowed else ''}: {result.known}"] if result.known else []
    lines += [f"support: {result.claim}"] if result.claim else []
    lines += [_verdict(v) for v in result.verdicts if v.status != Status.PASS]
    lines.append(repro(result))
    element = None if result.allowed else _ELEMENTS.get(result.status)
    if element is None:
        if result.status != Status.PASS:
            ET.SubElement(case, "system-out").text = "\n".join([result.status.value, *lines])
        return case
    found = ET.SubElement(case, element, type=result.status.value, message=_headline(result))
    found.text = "\n".join(lines)
    return case


def _headline(result: CaseResult) -> str:
    first = result.message.partition("\n")[0]
    worst = [f"{v.output}: error / bound {cell_text(v)}" for v in result.verdicts if not v.status.good]
    known = [f"known defect {result.known}"] if result.known else []
    return "; ".join([result.status.value, *known, *([first] if first else []), *worst])


def _verdict(verdict: Verdict) -> str:
    lines = [f"{verdict.output}: {verdict_text(verdict)}"]
    for point in verdict.worst:
        index, right, got, bound, ratio = point_cells(point)
        lines.append(f"  [{index}] reference {right}, got {got}, bound {bound}, error / bound {ratio}")
    return "\n".join(lines)


def _absent(info: BackendInfo, missing: Sequence[str]) -> ET.Element:
    case = ET.Element("testcase", classname=info.backend, name="library", time="0")
    asked = bool(info.override) or info.backend in missing
    found = ET.SubElement(case, "error" if asked else "skipped", message=info.problem)
    if asked:
        found.set("type", "unusable" if info.loaded else "absent")
    found.text = "\n".join(f"{how}: {file}: {why}" for how, file, why in info.attempts)
    return case
