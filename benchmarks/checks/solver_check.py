"""The planner's solver against brute force over all plans, on random cost models and counts.

`python -m benchmarks.checks.solver_check [--cases 10000] [--budgets 1500] [--seed 0]`

Both score each plan by the schedule, followed operation by operation, the reference with code of its own
(tests/moe/test_planner.py). Ends with an error and the case at the first one where the solver's plan is not the best.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.moe.test_planner import check_solver


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--budgets", type=int, default=1_500, help="of the cases have a memory budget")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    seen, refused = check_solver(arguments.cases, min(arguments.budgets, arguments.cases), arguments.seed)
    print(
        f"the solver's plan was the best of all in {arguments.cases} cases (seed {arguments.seed}, "
        f"{time.perf_counter() - start:.0f} s):"
    )
    print(f"{len(seen)} different plans; in {refused} cases nothing fitted the budget, and it was refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
