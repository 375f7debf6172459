#!/usr/bin/env bash
# Lint, types and tests, in this order; fails if any of them fails.
set -uo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
Usage: bash launch/test.sh [--fast | --durations FOLDER] [PYTEST ARGUMENT]...

Sets .venv up if need be, then runs ruff check, ruff format, mypy and pytest. All of them run, whatever fails before.
Arguments go to pytest: a file, -k NAME, -x. Without any, the tests marked `beside` run beside the others.

  --fast              the tests marked `fast` alone: they start no rank and no training
  --durations FOLDER  all tests, and what each takes and starts, in two files for python -m tests.durations
TEXT
    exit 0
fi

here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
arguments=("$@")
durations=
if [[ ${1:-} == --fast ]]; then
    arguments=(-m fast "${@:2}")
elif [[ ${1:-} == --durations ]]; then
    durations=$(cd "$here" && mkdir -p -- "${2:-}" && cd -- "$2" && pwd) || {
        echo "test: --durations needs a folder, not '${2:-}'" >&2
        exit 1
    }
    arguments=("${@:3}")
fi
bash launch/setup.sh --extra dev || exit 1

failed=()
check() {
    local name=$1 before=$SECONDS
    shift
    echo "==> $name"
    if ! "$@"; then
        failed+=("$name")
    fi
    echo "    $((SECONDS - before)) s"
}

check "ruff check" .venv/bin/ruff check
check "ruff format" .venv/bin/ruff format --check
check "mypy" .venv/bin/mypy
if [[ ${#arguments[@]} -gt 0 ]]; then
    check "pytest" .venv/bin/python -m pytest "${arguments[@]}"
else
    # Ranks wait for each other much of the time: those that keep one core busy find room beside them.
    beside=$(mktemp)
    trap 'kill %1 2>/dev/null; rm -f "$beside"' EXIT
    .venv/bin/python -m pytest -m beside ${durations:+--durations-file "$durations/beside.tsv"} >"$beside" 2>&1 &
    check "pytest, those marked beside excepted" \
        .venv/bin/python -m pytest -m "not beside" ${durations:+--durations-file "$durations/others.tsv"}
    check "pytest, those marked beside" wait %1
    cat "$beside"
fi

if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'test: FAILED after %d s:' "$SECONDS"
    printf ' [%s]' "${failed[@]}"
    echo
    exit 1
fi
echo "test: all passed in $SECONDS s"
