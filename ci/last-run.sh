#!/usr/bin/env bash
# The newest run of a library that this workflow kept: prints baseline=FOLDER, or baseline= where there is none.
#   ci/last-run.sh ARTIFACT DIR
# Needs gh with GH_TOKEN, GITHUB_REPOSITORY and GITHUB_WORKFLOW, as the service sets them.
set -euo pipefail
artifact=${1:?usage: ci/last-run.sh ARTIFACT DIR} folder=${2:?usage: ci/last-run.sh ARTIFACT DIR}
# The last run that ended, good or not: so each difference is reported once, in the week in which it appears.
ids=$(gh run list --repo "$GITHUB_REPOSITORY" --workflow "$GITHUB_WORKFLOW" --status completed --limit 10 --json databaseId --jq '.[].databaseId')
for id in $ids; do
    rm -rf "$folder"
    if gh run download "$id" --repo "$GITHUB_REPOSITORY" --name "$artifact" --dir "$folder" >&2 && [ -e "$folder/run" ]; then
        echo "baseline=$folder/run"
        exit
    fi
done
echo "ci/last-run.sh: no run of the last ten kept $artifact: nothing to compare with" >&2
echo "baseline="
