"""Published facts beside predictions: each has a source, and a config that composes for its ranks or a reason."""

from __future__ import annotations

import pytest

from benchmarks.kit.facts import FACTS, PublishedFact
from benchmarks.speed import published_facts
from benchmarks.speed.published_facts import figure_of
from models.blueprint import model_chunks
from simulator.clock.prediction import Prediction
from simulator.parameters import parameters

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_a_fact_is_modelled_or_says_why_not(fact: PublishedFact) -> None:
    assert len(fact.source.split()) > 1 and fact.published > 0 and fact.unit
    assert [fact.name for fact in FACTS].count(fact.name) == 1
    if fact.missing:
        assert len(fact.missing.split()) > 2 and not fact.overrides
        return
    config, machine = fact.config(), fact.machine()
    assert config.model.vocab_size is not None and machine.kind == "cuda"
    for name, value in fact.figures.items():
        assert machine[name] == value and machine.figures[name].stated is not None


@pytest.mark.parametrize(
    ("words", "billions"),
    [
        ("update of gpt-oss-20b streamed", 20.9),
        ("GPT 1.7B", 1.7),
        ("GPT 39.1B", 39.1),
        ("GPT 1008B", 1008.0),
        ("Mixtral 8x7B", 46.7),
        ("Mixtral 8x22B", 140.6),
        ("120B, 128K", 122.0),
        ("241B, 128K", 241.0),
        ("667B, 128K", 667.0),
    ],
)
def test_models_have_the_published_size(words: str, billions: float) -> None:
    (fact,) = [fact for fact in FACTS if fact.name.startswith(words)]
    config = fact.config()
    size = config.model.vocab_size or 0
    every = [p for of_stage in model_chunks(config) for chunk in of_stage for p in parameters(config, chunk, size)]
    # the published sizes have two or three digits, and SC'21's count no padding
    assert sum(parameter.total for parameter in every) / 1e9 == pytest.approx(billions, rel=0.03)


def test_predictions_are_told_in_the_units_of_the_facts() -> None:
    reasons = {"products": 6.0, "update": 0.5, "host_link": 1.0, "gradients:between": 0.5}
    prediction = Prediction(8.0, reasons, "a100_8x")
    by_name = {fact.name: fact for fact in FACTS}
    update = by_name["update of gpt-oss-20b streamed from the host, 8 H200"]
    assert figure_of(update, update.config(), prediction) == 1.5
    gpt = by_name["GPT 1.7B on 32 A100, TP1 PP1"]
    assert gpt.own_flops is not None
    assert figure_of(gpt, gpt.config(), prediction) == gpt.own_flops / 8 / 32 / 1e12
    # 8 operations a parameter and token, as SC'21 says of large models
    large = by_name["GPT 1008B on 3072 A100, TP8 PP64"]
    assert large.own_flops is not None and large.own_flops / (3072 * 2048) == pytest.approx(8 * 1.008e12, rel=0.02)
    oss = by_name["gpt-oss-120b on 64 H100, PP4 EP8"]
    assert figure_of(oss, oss.config(), prediction) == 512 * 4096 / 8 / 64


def test_the_table_has_every_fact(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = Prediction(4.0, {"products": 4.0}, "a100_8x")
    monkeypatch.setattr(published_facts, "predict", lambda *_: made_up)
    assert published_facts.main(["--json"]) == 0
    out = capsys.readouterr().out
    for fact in FACTS:
        assert fact.name in out and fact.source in out
        assert not fact.missing or fact.missing in out
    assert "not held to measured steps" in out
