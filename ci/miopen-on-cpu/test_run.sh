#!/usr/bin/env bash
# Tests of run.sh itself: exit statuses, what is left after failures and signals, going on where it ended.
#   ci/miopen-on-cpu/test_run.sh ROOT      ROOT: a folder that run.sh --root has filled (and that is used here)
# Needs root; a minute or so.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "${1:?usage: test_run.sh ROOT}" && pwd)
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
export TMPDIR=$work/tmp
mkdir "$TMPDIR"
nowhere=http://127.0.0.1:9/none # the discard port: refused at once
failed=0
fail() { printf 'test_run: %s\n' "$1" >&2; failed=1; }
# gives STATUS TEXT ARGUMENT...: run.sh ends with it and says it
gives() {
    local wanted=$1 text=$2 status=0
    shift 2
    "$here/run.sh" "$@" >"$work/out" 2>&1 || status=$?
    [ "$status" = "$wanted" ] || { fail "$*: status $status, expected $wanted"; sed 's/^/    /' "$work/out"; }
    grep -q -- "$text" "$work/out" || { fail "$*: does not say '$text'"; sed 's/^/    /' "$work/out"; }
    nothing_left "$*"
}
nothing_left() {
    ! grep -q -e "$root" -e "$TMPDIR" /proc/self/mounts || fail "$1: left a mount"
    [ -z "$(ls -A "$TMPDIR")" ] || fail "$1: left $(ls -A "$TMPDIR")"
}

gives 64 'no command given'
gives 64 'option --new is not known' --new
gives 64 'needs a value' --root
gives 0 'Exit status' --help
gives 75 'ARCHIVE UNAVAILABLE: debootstrap' --mirror "$nowhere" --bare -- true
gives 75 'nothing was tested; exit status 75' --mirror "$nowhere" --root "$work/fresh" --bare -- true
[ ! -e "$work/fresh/fs" ] || fail "a failed debootstrap counts as done"
grep -q 'cannot be had: debootstrap' "$work/fresh/unavailable" || fail "what cannot be had is not told"
gives 70 'No such script' --root "$work/suite" --suite no-such-suite --bare -- true
[ ! -e "$work/suite/unavailable" ] || fail "a suite that there is not counts as an archive that cannot be had"

# A folder with files of somebody else that have our names.
for name in fs log stamps mark; do
    mkdir -p "$work/theirs"
    echo thesis >"$work/theirs/$name"
    gives 64 "theirs/$name was not made by this script" --root "$work/theirs" --bare -- true
    [ "$(cat "$work/theirs/$name")" = thesis ] && [ "$(ls -A "$work/theirs")" = "$name" ] || fail "$name of others is lost"
    rm -rf --one-file-system "$work/theirs"
done

gives 0 'running: true' --root "$root" --bare -- true
! grep -q debootstrap "$work/out" || fail "a finished stage ran again"
gives 7 running --root "$root" --bare -- sh -c 'exit 7'
gives 1 'reported as 1' --root "$root" --bare -- sh -c 'exit 75'
gives 127 running --root "$root" --bare -- no-such-command
PYBNORM_SEEN=1 HIDDEN=1 gives 0 running --root "$root" --bare -- sh -c '[ "$PYBNORM_SEEN" = 1 ] && [ -z "${HIDDEN:-}" ]'
gives 0 running --root "$root" --out "$work/results" --bare -- sh -c 'echo written >/out/file'
[ "$(cat "$work/results/file")" = written ] || fail "--out does not bring files back"

# A tarball that is cut is thrown away, and the root made anew (which cannot succeed from nowhere).
"$here/run.sh" --mirror "$nowhere" --cache "$work/cache" --bare -- true >"$work/out" 2>&1 || true
name=$(sed -n 's/^miopen-on-cpu: tarball: \(.*\) (.*/\1/p' "$work/out")
[ -n "$name" ] || fail "the tarball's name is not said"
for content in 'somebody else'"'"'s' ''; do
    printf '%s' "$content" >"$name"
    gives 64 'was not made by this script' --mirror "$nowhere" --cache "$work/cache" --bare -- true
    [ "$(cat "$name")" = "$content" ] || fail "a file with the tarball's name is written over"
done
{ printf 'P*M\030\020\0\0\0pybnorm rig root'; head -c 1000 /dev/urandom; } >"$name"
gives 75 'is damaged: removed' --mirror "$nowhere" --cache "$work/cache" --bare -- true
[ ! -e "$name" ] || fail "the damaged tarball stays"

# A MIOpen that the rig does not know: 70, what to do, and nothing of the archive.
mkdir -p "$work/unknown/ci"
cp -r "$here" "$work/unknown/ci/"
sed -i 's/^readonly KNOWN_MIOPEN=.*/readonly KNOWN_MIOPEN=(0.0.1)/' "$work/unknown/ci/miopen-on-cpu/run.sh"
status=0
"$work/unknown/ci/miopen-on-cpu/run.sh" --root "$work/other" --bare -- true >"$work/out" 2>&1 || status=$?
[ "$status" = 70 ] || fail "an unknown MIOpen: status $status, expected 70"
grep -q 'Add it to KNOWN_MIOPEN' "$work/out" || fail "an unknown MIOpen: does not say what to do"
[ ! -e "$work/other/unavailable" ] || fail "an unknown MIOpen counts as an archive that cannot be had"
rm -rf --one-file-system "$work/other"

# A stand-in that does not build: 70, and not a word of packages.
mkdir -p "$work/project/ci"
cp -r "$here" "$work/project/ci/"
echo 'int broken(' >>"$work/project/ci/miopen-on-cpu/hipcpu.c"
status=0
"$work/project/ci/miopen-on-cpu/run.sh" --root "$root" --bare -- true >"$work/out" 2>&1 || status=$?
[ "$status" = 70 ] || fail "a broken stand-in: status $status, expected 70"
grep -q 'FAULT: the stand-ins do not build' "$work/out" || fail "a broken stand-in is not named"
nothing_left "a broken stand-in"
gives 0 'building the stand-ins' --root "$root" --bare -- true

# Two at once in one root.
"$here/run.sh" --root "$root" --bare -- sleep 5 >/dev/null 2>&1 &
sleep 2
status=0
"$here/run.sh" --root "$root" --bare -- true >"$work/out" 2>&1 || status=$?
[ "$status" = 64 ] || fail "a second run in one root: status $status, expected 64"
wait

# Signals, while the command runs and while a root is being made: no mount, no process, no temporary root stays.
for signal in INT TERM HUP KILL; do
    for place in command making; do
        mark=31536$RANDOM
        if [ "$place" = command ]; then
            arguments=(--root "$root" --bare -- sleep "$mark")
        else
            arguments=(--bare -- sleep "$mark")
        fi
        # A process group of its own, with signals as an interactive shell would leave them.
        python3 -c 'import os, signal, sys
os.setpgid(0, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])' "$here/run.sh" "${arguments[@]}" >"$work/out" 2>&1 &
        pid=$!
        sleep 4
        if [ "$place" = command ]; then
            pgrep -f "sleep $mark" >/dev/null || fail "$signal, $place: the command does not run"
        else
            pgrep -f "debootstrap.*$TMPDIR" >/dev/null || fail "$signal, $place: debootstrap does not run"
        fi
        # ^C reaches the group, a supervisor's signal only the script.
        if [ "$signal" = INT ]; then kill -INT -- "-$pid"; else kill "-$signal" "$pid"; fi
        status=0
        wait "$pid" 2>/dev/null || status=$?
        case $signal in INT) wanted=130 ;; TERM) wanted=143 ;; HUP) wanted=129 ;; KILL) wanted=137 ;; esac
        [ "$status" = "$wanted" ] || fail "$signal, $place: status $status, expected $wanted"
        sleep 1
        ! pgrep -f "sleep $mark" >/dev/null || fail "$signal, $place: the command lives on"
        ! pgrep -f "debootstrap.*$TMPDIR" >/dev/null || fail "$signal, $place: debootstrap lives on"
        if [ "$signal" = KILL ]; then # nobody was left to remove the folder; mounts went by themselves
            rm -rf --one-file-system "${TMPDIR:?}"/*
        fi
        nothing_left "$signal, $place"
    done
done
gives 0 'running: true' --root "$root" --bare -- true

[ "$failed" = 0 ] || exit 1
echo "test_run: passed"
