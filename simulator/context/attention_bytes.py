"""Memory of attention that is computed in slices (models/attention/slice_attention.py), in addition to its inputs."""

from __future__ import annotations

from collections.abc import Sequence

from configs import derived
from configs.schema import Config
from models.attention.mask_slices import SHORT_BACKWARD
from models.blueprint.operation import HEADS
from simulator.context.shared_rows import SharedRows
from simulator.memory_tape import OperationBytes
from simulator.sizes import FP32, Sizes

MERGED = 4  # copies of an output in fp32: the sum so far, the one to add, and both with their weights


class AttentionBytes:
    """Counts the bytes that one layer's attention takes on one rank. `sums`: bytes of the kept log-sum-exps."""

    def __init__(self, config: Config, sizes: Sizes, shared: SharedRows, on_gpu: bool) -> None:
        self.config, self.shared, self.on_gpu = config, shared, on_gpu
        self.element, self.num_rows, self.length = sizes.element, sizes.exchanged_tokens, sizes.length
        self.heads = config.model.num_attention_heads // sizes.ranks[HEADS]
        self.sums = self.num_rows * self.heads * FP32
        self.wide = FP32 // self.element

    def of_slices(self, inputs: Sequence[int], output: int) -> OperationBytes:
        """Return the bytes of attention that is computed in slices (blocks of its mask).

        `inputs`: bytes of query, key and value; `output`: of the output. Each pass holds its result and the kernel's
        output; merged outputs and accumulated gradients are fp32.
        """
        given, wide, slice_rows, sums = sum(inputs), self.wide, self.length, self.sums
        takes_wide = 0
        slides, rounds = derived.attended_share(self.config) < 1, self.shared.rounds > 1
        # Some documents are cut unless all are as long as samples.
        rounds |= self.shared.places > 1 and self.config.data.documents == "separate"
        if slides:
            slice_rows = min(slice_rows, self.config.model.sliding_window or slice_rows)
        if rounds:  # a cp_rank has two runs of a sample
            slice_rows = min(slice_rows, slice_rows // (2 * self.shared.places))
        if wide > 1 and not self.on_gpu and slice_rows < SHORT_BACKWARD:  # then the backward pass computes in fp32
            takes_wide = wide * (given + 2 * output)
        if not slides and not rounds:
            return OperationBytes(kept=sums, during=output + sums, work=2 * given + takes_wide)
        # A row has two or three slices if its window slides, or if it attends to keys before its run.
        during, work = MERGED * wide * output + 3 * sums, (1 + 2 * wide) * given + takes_wide
        if rounds:
            *_, key, value = inputs
            forward, backward = self._in_flight(key + value)
            taken = given * (wide if takes_wide else 1)  # copies of rows for slices, or of their gradients
            during, work = during + forward, work + backward + taken
        return OperationBytes(kept=sums, during=during, work=work)

    def of_latents(self, query: int, latents: int, output: int) -> OperationBytes:
        """Return the bytes of latent attention, given the bytes of its query, of its latents and of its output.

        Both passes expand the latents (compressed rows) that arrive in a round to keys and values, which are not kept.
        """
        model, head, wide = self.config.model, derived.head_dim(self.config), self.wide
        is_merged = self.shared.rounds > 1
        # Sequence rows of a round or of this rank, whichever are more.
        of_channel = max(self.num_rows, self.shared.round_rows) * self.heads * self.element
        product, keys = of_channel * (head + model.value_head_dim), of_channel * (head + model.rotary_head_dim)
        values = of_channel * model.value_head_dim
        padded = 0 if self.on_gpu else abs(keys - values)  # the CPU kernel takes values as wide as keys
        weight = self.heads * (head + model.value_head_dim) * model.kv_lora_rank * self.element
        forward, backward = self._in_flight(latents)
        merged = MERGED * wide * output + 3 * self.sums if is_merged else output + self.sums
        during = product + keys + padded + merged + forward
        added = (wide if is_merged else 1) * (query + keys + values)
        kernel = query + keys + values + query + keys + 2 * padded
        work = product + keys + added + max(kernel, keys + 2 * product + weight)
        work += backward
        return OperationBytes(kept=self.sums, during=during, work=work)

    @property
    def leaving(self) -> int:
        """Bytes of sent key and value rows that stay allocated until a pass ends, because receivers may be late."""
        model, tensor = self.config.model, self.config.parallel.tensor
        num_rows = min(self.num_rows, int(max(self.shared.received)))
        if model.attention == "latent":
            return num_rows * (model.kv_lora_rank + model.rotary_head_dim) * self.element
        ranks = tensor * self.shared.heads
        groups = max(1, derived.num_query_groups(self.config) // ranks)
        return num_rows * groups * 2 * derived.head_dim(self.config) * self.element

    def _in_flight(self, own_bytes: int) -> tuple[int, int]:
        """Return the bytes of keys and values in flight at a cp_rank in the (forward, backward) pass.

        `own_bytes`: bytes of the keys and values of the cp_rank's own rows.
        """
        shared = self.shared
        keys = min(2 * shared.coming_rows, shared.moved_rows)
        home = min(2 * self.num_rows + shared.round_rows, shared.moved_rows)
        # A round's gradients return when its keys have been used.
        back = keys + home if shared.rounds > 2 else max(keys, home)
        return own_bytes * keys // self.num_rows, own_bytes * back // self.num_rows
