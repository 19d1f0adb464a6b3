#!/usr/bin/env bash
# Style, types, scripts and workflows; seconds, and nothing is fetched.
#   ci/lint.sh
# Needs the extra lint. actionlint is no Python package that every index has: where it is not on the PATH its part is
# named as not run; the workflow `cpu` has it.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
cython-lint pybnorm/*.pyx pybnorm/_core/*.pxi pybnorm/*.pxd
mypy
shellcheck .ci/run ci/*.sh ci/*/*.sh
zizmor --offline --no-progress --quiet .github action.yml
if command -v actionlint >/dev/null; then
    actionlint
else
    echo "actionlint: NOT RUN, it is not here"
fi
