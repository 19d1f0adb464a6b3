#!/usr/bin/env bash
# Style, types, scripts and workflows; seconds, and nothing is fetched.
#   ci/lint.sh
# Needs the extra lint. actionlint and pyright are programs that their Python packages fetch: where one is not on the
# PATH its part is named as not run; the workflow `cpu` has both.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
cython-lint pybnorm/*.pyx pybnorm/_core/*.pxi pybnorm/*.pxd
mypy
shellcheck .ci/run ci/*.sh ci/*/*.sh
zizmor --offline --no-progress --quiet .github action.yml
for tool in actionlint pyright; do
    if command -v $tool >/dev/null; then
        $tool
    else
        echo "$tool: NOT RUN, it is not here"
    fi
done
