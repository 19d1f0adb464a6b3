#!/usr/bin/env bash
# Checks a vendor's library and leaves the reports: what the action does, for any CI service and for a shell.
#   ci/check-library.sh --out DIR [--backend NAME] [--suite NAME]... [--library FILE] [--baseline RUN] [--allow-known]
#       [-- OPTION...]
# DIR gets run/ (outputs, for later comparisons), report.html, junit.xml, report.json, summary.md and, with a baseline,
# compare.html and compare.json. The library is that of FILE, else the one that `pybnorm info` finds. Options after -- go
# to pybnorm check. With --allow-known, defects that pybnorm knows fail neither the check nor the comparison.
# GITHUB_STEP_SUMMARY and GITHUB_OUTPUT are written where the service names them.
# Exit status: that of pybnorm check; where it is 0, that of pybnorm compare against the baseline.
set -euo pipefail
usage() {
    echo "ci/check-library.sh: $1; usage: --out DIR [--backend NAME] [--suite NAME]... [--library FILE] [--baseline RUN] [--allow-known] [-- OPTION...]" >&2
    exit 2
}
out='' backend='' library='' baseline='' suites=() known=()
while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        --allow-known) known=(--allow-known); shift; continue ;;
        --out | --backend | --suite | --library | --baseline) [ $# -gt 1 ] || usage "$1 needs a value" ;;
        *) usage "what is $1?" ;;
    esac
    case $1 in
        --out) out=$2 ;;
        --backend) backend=$2 ;;
        --suite) suites+=(--suite "$2") ;;
        --library) library=$2 ;;
        --baseline) baseline=$2 ;;
    esac
    shift 2
done
[ -n "$out" ] || usage "--out is needed"
command -v pybnorm >/dev/null || { echo "ci/check-library.sh: pybnorm is not installed" >&2; exit 2; }
if [ -n "$baseline" ] && [ ! -e "$baseline" ]; then usage "--baseline $baseline is not there"; fi
[ ! -e "$out/run" ] || usage "there is a run in $out; name another folder"
mkdir -p "$out"

pages=() comparison=()
if python3 -c 'import jinja2, matplotlib' 2>/dev/null; then
    pages=(--html "$out/report.html") comparison=(--html "$out/compare.html")
else
    echo "no pages: they need pip install 'pybnorm[report]'"
fi
status=0
pybnorm check ${backend:+--backend "$backend"} ${library:+--library "$library"} ${suites[@]+"${suites[@]}"} --save "$out/run" --junit "$out/junit.xml" \
    ${pages[@]+"${pages[@]}"} ${known[@]+"${known[@]}"} "$@" || status=$?
: >"$out/summary.md"
if [ -e "$out/run/run.json" ] || [ -e "$out/run/journal.jsonl" ]; then
    pybnorm report "$out/run" --json >"$out/report.json"
    pybnorm report "$out/run" --markdown >"$out/summary.md"
    [ -z "${GITHUB_ACTIONS:-}" ] || pybnorm report "$out/run" --annotations
    if [ -n "$baseline" ]; then
        compared=0
        pybnorm compare "$baseline" "$out/run" --json "$out/compare.json" ${comparison[@]+"${comparison[@]}"} \
            ${known[@]+"${known[@]}"} | tee "$out/compare.txt" || compared=$?
        printf '## Compared with %s\n\n```\n%s\n```\n' "$(basename "$baseline")" "$(head -n 40 "$out/compare.txt")" >>"$out/summary.md"
        [ "$status" != 0 ] || status=$compared
    fi
fi
[ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$out/summary.md" >>"$GITHUB_STEP_SUMMARY"
[ -z "${GITHUB_OUTPUT:-}" ] || printf 'exit-status=%s\nreports=%s\n' "$status" "$out" >>"$GITHUB_OUTPUT"
exit "$status"
