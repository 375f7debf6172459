"""What a process tells CUDA and torch of its card: by layout, never over what the user has set, nothing on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from configs import derived
from configs.schema import Config, MoEConfig, ParallelConfig, TrainingConfig
from parallel import card, topology

EXACT = "pinned_max_round_threshold_mb:64"
SEGMENTS = {"PYTORCH_ALLOC_CONF": f"expandable_segments:True,{EXACT}"}


@pytest.fixture(autouse=True)
def _todays_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "_torch_release", lambda: (2, 13))


def make_config(device: str = "auto", **parallel: Any) -> Config:
    return Config(
        parallel=ParallelConfig(**parallel), moe=MoEConfig(num_experts=4), training=TrainingConfig(device=device)
    )


@pytest.mark.parametrize(
    ("layout", "connections"),
    [
        ({}, None),
        ({"tensor": 2}, "1"),
        ({"expert": 2}, "32"),
        ({"tensor": 2, "expert": 2}, "32"),
        ({"tensor": 2, "device_connections": 8}, "8"),
    ],
)
def test_the_environment_follows_the_layout(layout: dict[str, Any], connections: str | None) -> None:
    environment: dict[str, str] = {}
    card.set_environment(make_config(**layout), environment)
    assert environment == SEGMENTS | ({} if connections is None else {card.CONNECTIONS: connections})


def test_what_the_user_has_set_stays() -> None:
    for own in card.ALLOCATOR:
        environment = {own: "max_split_size_mb:128", card.CONNECTIONS: "4"}
        before = dict(environment)
        card.set_environment(make_config(tensor=2), environment)
        assert environment == before
        assert "CUDA_DEVICE_MAX_CONNECTIONS 4; allocator max_split_size_mb:128" in card.describe(
            make_config(), environment
        )


def test_nothing_is_set_for_the_cpu_or_against_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    card.set_environment(make_config("cpu", expert=2), environment)
    without = make_config()
    without.training.expandable_segments = False
    monkeypatch.setattr(card, "_torch_release", lambda: (2, 11))
    card.set_environment(without, environment)
    assert environment == {}


def test_pinned_memory_is_as_large_as_asked_for_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    without, environment = make_config(), dict[str, str]()
    without.training.expandable_segments = False
    card.set_environment(without, environment)
    assert environment == {"PYTORCH_ALLOC_CONF": EXACT}
    monkeypatch.setattr(card, "_torch_release", lambda: (2, 12))
    environment.clear()
    card.set_environment(make_config(), environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_products_leave_multiprocessors_to_exchanges_and_take_them_back() -> None:
    with card.exchanges_under_way():  # nothing is left before it was asked for
        assert torch._C._get_sm_carveout_experimental() is None
    card.leave_to_exchanges(derived.exchange_sms(make_config(expert=2)))
    try:
        with card.exchanges_under_way():
            assert torch._C._get_sm_carveout_experimental() == 20
        assert torch._C._get_sm_carveout_experimental() is None
    finally:
        card.leave_to_exchanges(derived.exchange_sms(make_config()))
    with card.exchanges_under_way():
        assert torch._C._get_sm_carveout_experimental() is None


class Joined(Exception):
    pass


@pytest.mark.parametrize("early", [True, False])
def test_nccl_is_told_the_device(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def join(backend: str, **options: Any) -> None:
        said.append((backend, options.get("device_id")))
        raise Joined

    device = torch.device("cuda", 0)
    monkeypatch.setattr(topology, "choose_device", lambda config: device)
    monkeypatch.setattr(topology, "apply_patches", lambda kind: None)
    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(Joined):
        topology.initialize(make_config(early_communicators=early))
    assert said == [device, ("nccl", device if early else None)]


def test_exchanges_have_priority_on_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "gloo"
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    assert topology._priority_groups(make_config()) == []
    backend = "nccl"
    assert topology._priority_groups(make_config()) == ["ep", "pp"]
    assert topology._priority_groups(make_config(priority_exchanges=False)) == []
