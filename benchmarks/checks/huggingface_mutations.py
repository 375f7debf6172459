"""Mutated Hugging Face configs and damaged folders, against transformers on the same folder.

`python -m benchmarks.checks.huggingface_mutations [--configs 630] [--damages 75] [--seed 0] [--only FAMILY]
[--published FOLDER] [--each 14] [--markdown] [--json]`

The starts are tiny models of every family, most with tied and untied or otherwise different ones
(tests/models/mutations.py). A case agrees (fp32 logits within tests/tolerances.py's ORACLE_LOGITS of transformers'), or
is refused by `models.convert import` and by opening the folder, in one line that names the key, the tensor or the file.
There is no third outcome: the exit status is 1 if there was one. What transformers cannot load, or fills with random
weights, must be refused. Some cases write the same meaning in another way, and must agree.

Published config.json files are starts too: every key stays, sizes are scaled down (tests/models/real_configs.py has a
few; FOLDER/*.json are more). Those that open as they are, are changed like the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.kit.tables import table
from models.huggingface.translate import FAMILIES
from tests.models.mutations import (
    AS_PUBLISHED,
    Case,
    Verdict,
    config_cases,
    damage_cases,
    graded,
    make_bases,
    same_meaning_cases,
    start_cases,
)
from tests.models.real_configs import PUBLISHED, make_starts, read_starts, scaled

WORDS = ("agrees", "refused", "wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configs", type=int, default=630)
    parser.add_argument("--damages", type=int, default=75)
    parser.add_argument("--published", type=Path, help="a folder of config.json files, *.json, as further starts")
    parser.add_argument("--each", type=int, default=14, help="changed configs of each published one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny
    start, counts, wrong, refused_starts = time.perf_counter(), Counter[tuple[str, str, str]](), [], []
    families = FAMILIES if arguments.only is None else (arguments.only,)

    def count(case: Case, verdict: Verdict) -> None:
        counts[case.family, case.kind, verdict.word] += 1
        text = f"{case.base}, {case.kind}: {case.what}: {verdict.word}, {verdict.why}"
        if arguments.verbose:
            print(text, flush=True)
        if verdict.word == "wrong":
            wrong.append(text)
        elif verdict.word == "refused" and case.kind == AS_PUBLISHED:
            refused_starts.append(text)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bases(folder)
        cases = itertools.chain(
            same_meaning_cases(),
            config_cases(folder, arguments.configs, arguments.seed),
            damage_cases(folder, arguments.damages, arguments.seed),
        )
        for case, verdict in graded(folder, (case for case in cases if case.family in families)):
            count(case, verdict)
        starts = {name: scaled(config) for name, config in PUBLISHED.items()}
        if arguments.published is not None:
            starts |= read_starts(arguments.published)
        starts = {name: config for name, config in starts.items() if config["model_type"] in families}
        not_made = make_starts(folder, starts)
        opened = []
        for case, verdict in graded(folder, start_cases([name for name in starts if name not in not_made])):
            count(case, verdict)
            opened += [case.base] if verdict.word == "agrees" else []
        number = arguments.each * len(opened)
        for case, verdict in graded(folder, config_cases(folder, number, arguments.seed, opened)):
            count(dataclasses.replace(case, kind="published, changed"), verdict)
    kinds = list(dict.fromkeys(kind for _, kind, _ in counts))
    table_rows = [
        [family, *(" / ".join(str(counts[family, kind, word]) for word in WORDS) for kind in kinds)]
        for family in families
        if any(key[0] == family for key in counts)
    ]
    total = Counter(word for (_, _, word), number in counts.items() for _ in range(number))
    print(f"seed {arguments.seed}, {time.perf_counter() - start:.0f} s; each cell: {' / '.join(WORDS)}")
    print(table(["family", *kinds], table_rows, arguments.markdown))
    print(", ".join(f"{total[word]} {word}" for word in WORDS))
    print(f"{len(starts)} published configs; {len(opened)} of them open")
    for name, why in not_made.items():
        print(f"{name}: transformers makes none: {why}")
    for text in (*refused_starts, *wrong):
        print(text)
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, **{word: total[word] for word in WORDS}}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
