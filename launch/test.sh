#!/usr/bin/env bash
# Lint, types and tests, in this order; fails if any of them fails.
set -uo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
Usage: bash launch/test.sh [PYTEST ARGUMENT]...

Sets .venv up if need be, then runs ruff check, ruff format, mypy and pytest. All of them run, whatever fails before.
Arguments go to pytest: a file, -k NAME, -x. Without any, the tests marked `beside` run beside the others.
TEXT
    exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
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
if [[ $# -gt 0 ]]; then
    check "pytest" .venv/bin/python -m pytest "$@"
else
    # Ranks wait for each other much of the time: those that keep one core busy find room beside them.
    beside=$(mktemp)
    trap 'kill %1 2>/dev/null; rm -f "$beside"' EXIT
    .venv/bin/python -m pytest -m beside >"$beside" 2>&1 &
    check "pytest, those marked beside excepted" .venv/bin/python -m pytest -m "not beside"
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
