"""Mutated Hugging Face configs and damaged folders, against transformers on the same folder.

`python -m benchmarks.huggingface_mutations [--configs 525] [--damages 75] [--seed 0] [--only FAMILY] [--markdown]
[--json]`

Every family, most with tied and untied or otherwise different tiny models (tests/models/mutations.py). A case agrees
(fp32 logits within tests/tolerances.py's ORACLE_LOGITS of transformers'), or is refused by `models.convert import` and
by opening the folder, in one line that names the key, the tensor or the file. There is no third outcome: the exit
status is 1 if there was one. What transformers cannot load, or fills with random weights, must be refused. Some cases
write the same meaning in another way, and must agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.tables import table
from tests.models.mutations import FAMILIES, config_cases, damage_cases, judged, make_bases, same_meaning_cases

WORDS = ("agrees", "refused", "wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--configs", type=int, default=525)
    parser.add_argument("--damages", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=FAMILIES)
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny
    start, counts, wrong = time.perf_counter(), Counter[tuple[str, str, str]](), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bases(folder)
        cases = itertools.chain(
            same_meaning_cases(),
            config_cases(folder, arguments.configs, arguments.seed),
            damage_cases(folder, arguments.damages, arguments.seed),
        )
        chosen = (case for case in cases if arguments.only in (None, case.family))
        for case, verdict in judged(folder, chosen):
            counts[case.family, case.kind, verdict.word] += 1
            text = f"{case.base}, {case.kind}: {case.what}: {verdict.word}, {verdict.why}"
            if arguments.verbose:
                print(text, flush=True)
            if verdict.word == "wrong":
                wrong.append(text)
    kinds = list(dict.fromkeys(kind for _, kind, _ in counts))
    families = [family for family in FAMILIES if any(key[0] == family for key in counts)]
    rows = [
        [family, *(" / ".join(str(counts[family, kind, word]) for word in WORDS) for kind in kinds)]
        for family in families
    ]
    total = Counter(word for (_, _, word), number in counts.items() for _ in range(number))
    print(f"seed {arguments.seed}, {time.perf_counter() - start:.0f} s; each cell: {' / '.join(WORDS)}")
    print(table(["family", *kinds], rows, arguments.markdown))
    print(", ".join(f"{total[word]} {word}" for word in WORDS))
    for text in wrong:
        print(text)
    if arguments.json:
        print(json.dumps({"seed": arguments.seed, **{word: total[word] for word in WORDS}}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
