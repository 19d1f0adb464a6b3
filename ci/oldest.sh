#!/usr/bin/env bash
# The quick tests on the oldest versions that pyproject.toml allows, all of them together.
#   ci/oldest.sh [WORD...]      WORDs go to pytest
# Needs Python 3.10, the oldest, as python3 (variable PYTHON names another), with its headers, and a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d "${TMPDIR:-/tmp}/pybnorm-oldest.XXXXXX")
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH" VIRTUAL_ENV=$work/venv
python -m pip install --quiet uv
# The extra test-full has what builds the extension, too.
uv pip install --quiet --resolution lowest-direct -r pyproject.toml --extra test-full
uv pip install --quiet --no-deps --no-build-isolation .
uv pip freeze | grep -iE '^(numpy|cython|setuptools|onednn|ml_dtypes|click|rich|pytest|hypothesis|jsonschema|matplotlib|jinja2|array)'
PYBNORM_REQUIRE=onednn PYBNORM_REQUIRE_DEVICE=onednn pytest -q -n "$(nproc)" --dist loadfile "$@"
