#!/usr/bin/env bash
# An issue that a vendor's library fails, or differs from its last run; a comment where one of this title is open.
#   ci/difference-issue.sh NAME DIR      DIR: the action's reports are in DIR/pybnorm-*
# Needs gh with GH_TOKEN, and GITHUB_REPOSITORY, GITHUB_SERVER_URL, GITHUB_RUN_ID, as the service sets them.
set -euo pipefail
name=${1:?usage: ci/difference-issue.sh NAME DIR} folder=${2:?usage: ci/difference-issue.sh NAME DIR}
title="$name: wrong, or not as in its last run"
body=$(mktemp)
trap 'rm -f "$body"' EXIT
{
    echo "Run: $GITHUB_SERVER_URL/$GITHUB_REPOSITORY/actions/runs/$GITHUB_RUN_ID"
    echo
    cat "$folder"/pybnorm-*/summary.md 2>/dev/null || echo "It left no report: its output says why."
} >"$body"
if [ "$(stat -c %s "$body")" -gt 60000 ]; then truncate -s 60000 "$body"; fi # an issue holds 65,536 characters
number=$(gh issue list --repo "$GITHUB_REPOSITORY" --state open --limit 200 --json number,title |
    TITLE=$title python3 -c 'import json, os, sys; print(*[i["number"] for i in json.load(sys.stdin) if i["title"] == os.environ["TITLE"]][:1])')
if [ -n "$number" ]; then
    gh issue comment "$number" --repo "$GITHUB_REPOSITORY" --body-file "$body"
else
    gh issue create --repo "$GITHUB_REPOSITORY" --title "$title" --body-file "$body"
fi
