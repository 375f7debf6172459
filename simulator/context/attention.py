"""What attention by slices takes beside the tensors that it is given (models/attention/sliced.py and latents.py)."""

from __future__ import annotations

from collections.abc import Sequence

from configs import derived
from configs.schema import Config
from models.attention.slices import SHORT_BACKWARD
from models.blueprint.operation import HEADS
from simulator.context.rows import SharedRows
from simulator.memory_tape import OperationBytes
from simulator.sizes import FP32, Sizes

MERGED = 4  # times an output in fp32: the sum so far, the one that is added, and both with their weights


class AttentionBytes:
    """What one layer's attention takes on one rank; `sums`: the logs of its sums of exponentials, which are kept."""

    def __init__(self, config: Config, sizes: Sizes, shared: SharedRows, on_gpu: bool) -> None:
        self.config, self.shared, self.on_gpu = config, shared, on_gpu
        self.element, self.rows, self.length = sizes.element, sizes.place_tokens, sizes.length
        self.heads = config.model.num_attention_heads // sizes.ranks[HEADS]
        self.sums = self.rows * self.heads * FP32
        self.wide = FP32 // self.element

    def of_slices(self, inputs: Sequence[int], output: int) -> OperationBytes:
        """Beside its result a pass holds what the kernel gave; what is merged, or added up, is so in fp32. Bytes of
        query, key and value."""
        given, wide, rows, sums = sum(inputs), self.wide, self.length, self.sums
        takes_wide = 0
        slides, rounds = derived.attended_share(self.config) < 1, self.shared.rounds > 1
        # of documents of other lengths than samples some are cut
        rounds |= self.shared.places > 1 and self.config.data.documents == "separate"
        if slides:
            rows = min(rows, self.config.model.sliding_window or rows)
        if rounds:  # a place has two runs of a sample
            rows = min(rows, rows // (2 * self.shared.places))
        if wide > 1 and not self.on_gpu and rows < SHORT_BACKWARD:  # then the way back computes in fp32
            takes_wide = wide * (given + 2 * output)
        if not slides and not rounds:
            return OperationBytes(kept=sums, during=output + sums, work=2 * given + takes_wide)
        # each row of a sliding window has two or three slices, as one with keys before its run
        during, work = MERGED * wide * output + 3 * sums, (1 + 2 * wide) * given + takes_wide
        if rounds:
            *_, key, value = inputs
            forward, backward = self._on_their_way(key + value)
            taken = given * (wide if takes_wide else 1)  # rows that slices take out of a place's, or their gradients
            during, work = during + forward, work + backward + taken
        return OperationBytes(kept=sums, during=during, work=work)

    def of_latents(self, query: int, latents: int, output: int) -> OperationBytes:
        """A round's latents are expanded to keys and values, and again going back; nothing of these is kept."""
        model, head, wide = self.config.model, derived.head_dim(self.config), self.wide
        is_merged = self.shared.rounds > 1
        # of a round, or of the place's own rows, the more: the product, and keys beside it
        of_channel = max(self.rows, self.shared.round_rows) * self.heads * self.element
        product, keys = of_channel * (head + model.value_head_dim), of_channel * (head + model.rotary_head_dim)
        values = of_channel * model.value_head_dim
        padded = 0 if self.on_gpu else abs(keys - values)  # the CPU's kernel takes values as wide as keys
        weight = self.heads * (head + model.value_head_dim) * model.kv_lora_rank * self.element
        forward, backward = self._on_their_way(latents)
        merged = MERGED * wide * output + 3 * self.sums if is_merged else output + self.sums
        during = product + keys + padded + merged + forward
        added = (wide if is_merged else 1) * (query + keys + values)
        kernel = query + keys + values + query + keys + 2 * padded
        work = product + keys + added + max(kernel, keys + 2 * product + weight)
        work += backward
        return OperationBytes(kept=self.sums, during=during, work=work)

    @property
    def leaving(self) -> int:
        """Bytes of key and value rows that a place has sent and that others may take only later: until a pass ends."""
        model, tensor = self.config.model, self.config.parallel.tensor
        rows = min(self.rows, int(max(self.shared.received)))
        if model.attention == "latent":
            return rows * (model.kv_lora_rank + model.rotary_head_dim) * self.element
        ranks = tensor * self.shared.heads
        groups = max(1, derived.num_query_groups(self.config) // ranks)
        return rows * groups * 2 * derived.head_dim(self.config) * self.element

    def _on_their_way(self, of_place: int) -> tuple[int, int]:
        """Bytes of rows that come and of those that leave, in the forward and in the backward pass: there also of
        gradients that go home. `of_place`: of all rows that a place has."""
        shared = self.shared
        keys = min(2 * shared.coming_rows, shared.moved_rows)
        home = min(2 * self.rows + shared.round_rows, shared.moved_rows)
        back = keys + home if shared.rounds > 2 else max(keys, home)  # one round's go home when its keys are used
        return of_place * keys // self.rows, of_place * back // self.rows
