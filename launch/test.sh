#!/usr/bin/env bash
# Lint, types and tests, in this order; fails if any of them fails.
set -uo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    cat <<'TEXT'
Usage: bash launch/test.sh [PYTEST ARGUMENT]...

Sets .venv up if need be, then runs ruff check, ruff format, mypy and pytest. All of them run, whatever fails before.
Arguments go to pytest: a file, -k NAME, -x.
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
check "pytest" .venv/bin/python -m pytest "$@"

if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'test: FAILED after %d s:' "$SECONDS"
    printf ' [%s]' "${failed[@]}"
    echo
    exit 1
fi
echo "test: all passed in $SECONDS s"
