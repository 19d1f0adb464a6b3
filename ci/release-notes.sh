#!/usr/bin/env bash
# Prints what CHANGELOG.md says of a version: the notes of its release.
#   ci/release-notes.sh VERSION
# Exit status 1: it says nothing, or there are files in changelog.d that `towncrier build` has not put there.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: ci/release-notes.sh VERSION}
left=$(find changelog.d -name '*.md' ! -name README.md)
[ -z "$left" ] || { printf 'ci/release-notes.sh: not in CHANGELOG.md yet: %s\n' "${left//$'\n'/ }" >&2; exit 1; }
notes=$(awk -v version="$version" '/^## /{found = $2 == version; next} found' CHANGELOG.md)
[ -n "${notes//[[:space:]]/}" ] || { echo "ci/release-notes.sh: CHANGELOG.md has no $version" >&2; exit 1; }
printf '%s\n' "$notes"
