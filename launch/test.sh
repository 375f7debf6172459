#!/usr/bin/env bash
# Lint, types and tests, in this order; fails if any of them fails.
set -uo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
Usage: bash launch/test.sh [--fast | --durations FOLDER] [PYTEST ARGUMENT]...
       bash launch/test.sh --claims [WORD]...

Sets .venv up if need be, then runs ruff check, ruff format, mypy and pytest. All of them run, whatever fails before.
Arguments go to pytest: a file, -k NAME, -x. All tests, and the fast ones, run in several lanes at once.

  --fast              the tests marked `fast` alone: they start no rank and no training
  --claims            no test: the command of every claim in benchmarks/results/claims.yaml, at its smallest size; or of
                      those with one of the words
  --durations FOLDER  keep what each test takes and starts, for python -m tests.durations
TEXT
    exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
bash launch/setup.sh --extra dev || exit 1
if [[ ${1:-} == --claims ]]; then
    exec .venv/bin/python -m benchmarks.kit.claims "${@:2}"
fi

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
if [[ ${1:-} == --fast ]]; then
    check "pytest" .venv/bin/python -m tests.lanes -m fast "${@:2}"
elif [[ $# -eq 0 || $1 == --durations ]]; then
    check "pytest" .venv/bin/python -m tests.lanes "$@"
else
    check "pytest" .venv/bin/python -m pytest "$@"
fi

if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'test: FAILED after %d s:' "$SECONDS"
    printf ' [%s]' "${failed[@]}"
    echo
    exit 1
fi
echo "test: all passed in $SECONDS s"
