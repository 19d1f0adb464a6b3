"""Writes docs/defects.md from the table of known defects; tests/check/test_check_defects.py says whether it is current.

python ci/defects-page.py
"""

from pathlib import Path

from pybnorm._find import SPECS
from pybnorm.defects import DEFECTS, Defect, Effect, Run


def page() -> str:
    """The table as a page of Markdown."""
    lines = [
        "# Known defects",
        "",
        "This page lists what `pybnorm.known_defects` knows of vendor libraries. `python ci/defects-page.py` makes "
        "it of the table in `pybnorm/defects/`.",
        "`pybnorm check --case CASE` shows a defect. Plans with algorithm `auto`, and all that is built on them, take "
        "an algorithm of the library without the defect, where there is one.",
        'Else `Handle(known_defects=...)` says what becomes of the call: with `"avoid"` `native` computes it, with '
        '`"avoid_all"` also what is only less exact than it could be.',
    ]
    for backend in sorted({d.backend for d in DEFECTS}):
        lines += ["", f"## {SPECS[backend].label}"]
        for d in DEFECTS:
            if d.backend == backend:
                lines += ["", f"### {d.id}", "", f"{d.what[0].upper()}{d.what[1:]}.", "", *_facts(d)]
    return "\n".join(lines) + "\n"


def _told(run: Run) -> str:
    version = ".".join(map(str, run.version))
    build = f", build `{run.build}`" if run.build else ""
    return f"{version} ({run.package}{build}), {run.card}, {run.date}, [{run.file}](results/{run.file})"


def _facts(defect: Defect) -> list[str]:
    """What else there is to say of a defect, as a list."""
    first, fixed = (".".join(map(str, version or ())) for version in (defect.first, defect.fixed))
    since = f"from {first} on," if first else "all" if fixed else "all,"
    read = " to ".join(".".join(map(str, version)) for version in defect.read)
    effects = {Effect.WRONG: "wrong", Effect.FAILS: "the call fails", Effect.WEAK: "less exact than it could be"}
    if defect.note == "sums in chains":  # CHAIN, which is correct
        effects[Effect.WRONG] = "inexact"
    links = [f"[{link}](https://github.com/{link.replace('#', '/issues/')})" for link in defect.links]
    outputs = f": {', '.join(f'`{name}`' for name in defect.outputs)}" if defect.outputs else ""
    ways = " or ".join(f"`{name}`" for name in defect.ways)
    taken = "where it takes" if defect.effect == Effect.WEAK else "yes, by"
    avoided = f"{taken} {ways}" if ways else "no"
    if defect.refused:
        avoided = "no: the call is refused"
    elif defect.cards:
        avoided = "no: the error of the call names it"
    elif defect.effect != Effect.WEAK or defect.better:
        policy = "avoid_all" if defect.effect == Effect.WEAK else "avoid"
        avoided += f'; with `known_defects="{policy}"` `native` computes the call'
    elif not ways:
        avoided += ": it is no error"
    return [
        f"* Example: {defect.example}",
        f"* Versions: {since} {f'before {fixed}' if fixed else 'of which none is known to be correct'}",
        *([f"* Cards: {', '.join(f'{card}x' for card in defect.cards)}"] if defect.cards else ()),
        *(f"* Seen: {_told(run)}" for run in defect.seen),
        f"* Read in the source: {read or 'no'}",
        *(f"* Build `{build}`: {'has it' if has else 'does not have it'}" for build, has in defect.builds.items()),
        f"* Effect: {effects[defect.effect]}{outputs}",
        f"* Avoided by algorithm `auto`: {avoided}",
        f"* Reported: {', '.join(links) or 'no'}",
        f"* Case: `{defect.case}`",
    ]


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "defects.md"
    target.write_text(page())
    print(target)
