"""Every call into TransformerEngine has the arguments that the pinned version takes, by its source."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.parallel.transformer_engine.calls import Call, calls, imported
from tests.parallel.transformer_engine.signatures import FILE, ROOT, trees

# What Megatron-core looks for and goes on without, and what that costs.
LACKS = {
    "transformer_engine.pytorch.attention:_SplitAlongDim": "gradients of q, k and v are put together by a copy",
    "transformer_engine.pytorch.module.base:get_workspace": "no te_general_gemm; moe/router.py has its own product",
}
# Called in a function that is defined only beside a name of LACKS.
NOT_REACHED = {"transformer_engine.pytorch.cpp_extensions:general_gemm"}
Signatures = dict[str, list[list[Any]] | None]


def known() -> Signatures:
    return json.loads(FILE.read_text(encoding="utf-8"))["signatures"]


def faults(signatures: Signatures) -> Iterator[str]:
    for file, tree in trees().items():
        for each in imported(tree).values():
            if signatures[each.target] is None and each.target not in LACKS:
                yield f"{file}:{each.line}: {each.target} is not there"
        for call in calls(tree):
            for fault in faults_of(call, signatures) if call.target not in NOT_REACHED else ():
                yield f"{file}:{call.line}: {call.target}: {fault}"


def faults_of(call: Call, signatures: Signatures) -> Iterator[str]:
    parameters = signatures.get(call.target)
    if parameters is None:
        if call.target not in LACKS:
            yield "is not there"
        return
    names = {name for name, kind, _ in parameters if kind in ("plain", "keyword")}
    plain = [name for name, kind, _ in parameters if kind == "plain"]
    kinds = {kind for _, kind, _ in parameters}
    if "**" not in kinds and (unknown := call.keywords - names):
        yield f"takes no {', '.join(sorted(unknown))}"
    if "*" not in kinds and call.positional > len(plain):
        yield f"takes {len(plain)} positional arguments, {call.positional} are given"
    given = call.keywords | set(plain[: call.positional])
    missing = [name for name, kind, default in parameters if kind in ("plain", "keyword") and not default]
    if not call.open and (lacking := [name for name in missing if name not in given]):
        yield f"needs {', '.join(lacking)}"


def test_every_call_fits_the_pinned_version() -> None:
    assert list(faults(known())) == []


def test_the_signatures_are_those_of_the_pinned_version() -> None:
    (pinned,) = re.findall(r"transformer-engine\[[a-z0-9,-]+\]==([0-9.]+)", (ROOT / "pyproject.toml").read_text())
    assert json.loads(FILE.read_text(encoding="utf-8"))["version"] == pinned


def test_what_is_missing_is_named() -> None:
    missing = {target for target, parameters in known().items() if parameters is None}
    assert missing == set(LACKS)


@pytest.mark.parametrize(
    ("target", "parameter"),
    [
        ("transformer_engine.pytorch:Linear", "fuse_wgrad_accumulation"),
        ("transformer_engine.pytorch:LayerNormLinear", "normalization"),
        ("transformer_engine.pytorch:DotProductAttention", "attn_mask_type"),
        ("transformer_engine.pytorch:GroupedLinear", "num_gemms"),
        ("transformer_engine.pytorch.cross_entropy:parallel_cross_entropy", "target"),
    ],
)
def test_a_parameter_that_goes_is_noticed(target: str, parameter: str) -> None:
    changed = copy.deepcopy(known())
    parameters = changed[target]
    assert parameters is not None
    parameters[:] = [each for each in parameters if each[0] != parameter]
    assert any(target in fault for fault in faults(changed))


def test_a_parameter_that_is_needed_is_noticed() -> None:
    changed = copy.deepcopy(known())
    parameters = changed["transformer_engine.pytorch:Fp8Padding"] = [["num_gemms", "plain", False]]
    call = Call("transformer_engine.pytorch:Fp8Padding", 1, 0, frozenset(), False)
    assert parameters and list(faults_of(call, changed)) == ["needs num_gemms"]
