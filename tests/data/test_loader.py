import functools
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from base.errors import ConfigError
from configs.schema import Config
from data.loader import HELD_OUT, Loader, build_data, entropy, finish_batch, label_counts
from data.prepare import prepare
from tests.waits import LONG, until

pytestmark = pytest.mark.fast


class Counting:
    """Samples whose tokens are their index; `fail_at` raises, each batch waits for `ready`."""

    def __init__(self, fail_at: int | None = None, ready: threading.Event | None = None):
        self.fail_at, self.ready = fail_at, ready
        self.calls = 0

    def batch(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        self.calls += 1
        assert self.ready is None or self.ready.wait(LONG)
        if self.fail_at is not None and self.fail_at in indices:
            raise OSError("disk on fire")
        return {"tokens": np.array(indices, dtype=np.int64)[:, None]}


def steps_of(loader: Loader, n: int) -> list[list[list[int]]]:
    """Sample indices: [step][micro-batch][sample]."""
    found = [[batch["tokens"][:, 0].tolist() for batch in loader.next_step()] for _ in range(n)]
    loader.close()
    return found


def test_steps_and_micro_batches():
    loader = Loader(Counting(), global_batch_size=8, micro_batch_size=2)
    assert steps_of(loader, 2) == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]]]
    loader = Loader(Counting(), global_batch_size=8, micro_batch_size=2, rank=1, world_size=2)
    assert steps_of(loader, 1) == [[[2, 3], [6, 7]]]


@pytest.mark.parametrize("world", [2, 4])
def test_every_world_size_gives_the_same_micro_batches(world):
    whole = steps_of(Loader(Counting(), global_batch_size=16, micro_batch_size=2), 3)
    ranks = [
        steps_of(Loader(Counting(), global_batch_size=16, micro_batch_size=2, rank=rank, world_size=world), 3)
        for rank in range(world)
    ]
    for step, expected in enumerate(whole):
        assert sorted(micro for rank in ranks for micro in rank[step]) == expected


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_resume_at_any_point_and_world_size(prefetch):
    whole = steps_of(Loader(Counting(), global_batch_size=8, micro_batch_size=2, prefetch=prefetch), 6)
    first = Loader(Counting(), global_batch_size=8, micro_batch_size=2, prefetch=prefetch)
    for done in range(4):
        assert first.consumed_samples == 8 * done
        arguments = {
            "consumed_samples": first.consumed_samples,
            "prefetch": prefetch,
            "global_batch_size": 8,
            "micro_batch_size": 2,
        }
        assert steps_of(Loader(Counting(), **arguments), 2) == whole[done : done + 2]
        ranks = [steps_of(Loader(Counting(), **arguments, rank=rank, world_size=2), 1)[0] for rank in (0, 1)]
        assert sorted(ranks[0] + ranks[1]) == whole[done]
        first.next_step()
    first.close()


def test_wrong_batch_sizes():
    with pytest.raises(ConfigError, match="training.global_batch_size=8.*micro_batch_size \\(3\\).*2.*for example 6"):
        Loader(Counting(), global_batch_size=8, micro_batch_size=3, world_size=2)


def test_prefetch_is_bounded_and_close_ends_the_thread():
    samples = Counting()
    before = threading.active_count()
    loader = Loader(samples, global_batch_size=2, micro_batch_size=2, prefetch=3)
    until(lambda: samples.calls >= 4, "the queue to fill")
    time.sleep(0.2)
    assert samples.calls == 4  # three in the queue, one in hand
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_step()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_reach_the_caller_after_the_good_steps(prefetch):
    loader = Loader(Counting(fail_at=5), global_batch_size=2, micro_batch_size=2, prefetch=prefetch)
    assert [loader.next_step()[0]["tokens"][0, 0].item() for _ in range(2)] == [0, 2]
    with pytest.raises(OSError, match="disk on fire"):
        loader.next_step()


def test_waiting_ends_and_is_measured(monkeypatch):
    ready = threading.Event()
    loader = Loader(Counting(ready=ready), global_batch_size=2, micro_batch_size=2)
    threading.Timer(0.1, ready.set).start()
    loader.next_step()
    assert loader.wait_seconds > 0
    loader.close()
    ready = threading.Event()
    monkeypatch.setattr("data.loader.TIMEOUT_SECONDS", 0.1)
    slow = Loader(Counting(ready=ready), global_batch_size=2, micro_batch_size=2)
    with pytest.raises(TimeoutError, match="no batch was read within 0.1 s"):
        slow.next_step()
    ready.set()
    slow.close()


def test_a_finite_loader_ends():
    for prefetch in (0, 2):
        loader = Loader(Counting(), global_batch_size=2, micro_batch_size=1, prefetch=prefetch, num_steps=2)
        assert len(loader.next_step()) == 2 == len(loader.next_step())
        with pytest.raises(StopIteration):
            loader.next_step()
        loader.close()


@pytest.fixture
def full_config(config) -> Config:
    whole = Config()
    whole.data = config
    whole.model.sequence_length = 32
    whole.training.global_batch_size, whole.training.micro_batch_size, whole.training.eval_batches = 8, 2, 3
    return whole


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_build_data(full_config, family):
    full_config.model.family = family
    full_config.model.sentence_head = "next_sentence" if family == "bert" else "none"
    prepared = prepare(full_config.data, family, False)

    def collect(world: int, consumed: int, steps: int) -> list[list[torch.Tensor]]:
        """Per step, the micro-batches of all ranks, in the order of the samples."""
        loaders = [
            build_data(full_config, prepared, rank=r, world_size=world, consumed_samples=consumed)[0]
            for r in range(world)
        ]
        found = []
        for _ in range(steps):
            ranks = [loader.next_step() for loader in loaders]
            found.append([batch["tokens"] for batches in zip(*ranks, strict=True) for batch in batches])
        for loader in loaders:
            loader.close()
        return found

    expected = collect(1, 0, 4)
    for world in (2, 4):
        assert all(
            torch.equal(a, b)
            for x, y in zip(collect(world, 8, 3), expected[1:], strict=True)
            for a, b in zip(x, y, strict=True)
        )

    train, make_validation_loaders = build_data(full_config, prepared, rank=0, world_size=1, consumed_samples=0)
    batch = train.next_step()[0]
    keys = {"tokens", "labels", "loss_mask"} | (
        {"types", "padding_mask", "sentence_label"} if family == "bert" else set()
    )
    assert set(batch) == keys
    assert batch["tokens"].dtype == torch.int64 == batch["labels"].dtype and batch["loss_mask"].dtype == torch.float32
    train.close()
    losses = [unigram_entropy(make_validation_loaders[HELD_OUT](), prepared.vocab_size) for _ in range(2)]
    assert losses[0] == losses[1] and 1 < losses[0] < np.log(prepared.vocab_size)


def test_build_data_errors(full_config):
    prepared = prepare(full_config.data, "gpt", False)
    full_config.model.vocab_size = 300
    with pytest.raises(ConfigError, match="model.vocab_size=300 must be at least .*tokenizer"):
        build_data(full_config, prepared, rank=0, world_size=1, consumed_samples=0)
    full_config.model.vocab_size = None
    full_config.model.sequence_length = 10**6
    with pytest.raises(ConfigError, match="model.sequence_length"):
        build_data(full_config, prepared, rank=0, world_size=1, consumed_samples=0)


def unigram_entropy(loader: Loader, vocab_size: int) -> float:
    """Return the entropy in nats of the labels of a finite loader, which is closed."""
    steps = []
    try:
        while True:
            steps.append(loader.next_step())
    except StopIteration:
        return entropy(label_counts(steps, vocab_size))
    finally:
        loader.close()


def test_entropy():
    assert entropy(torch.tensor([5, 5, 0, 5, 5])) == pytest.approx(np.log(4))
    assert entropy(torch.tensor([0, 9])) == 0
    step = [{"labels": torch.tensor([[1, 1, 2]]), "loss_mask": torch.tensor([[1.0, 0.0, 1.0]])}]
    assert label_counts([step, step], 4).tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("pin", [False, True])
def test_batches_are_pinned_only_where_asked(monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
    """A run on the CPU of a machine with a GPU makes no CUDA context."""
    pinned = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    finish = functools.partial(finish_batch, prepare=None, pin=pin)
    steps_of(Loader(Counting(), global_batch_size=4, micro_batch_size=2, prefetch=0, finish=finish), 1)
    assert len(pinned) == (2 if pin else 0)
