"""Drafts by passes on the GPU, of a small model or of a head, before the step that has rows for
them.

What computes has weights, inputs and pages of its own; these go by the large model's numbers, as on
the CPU (`runner.draft_model`), and are found by the page table of its layers that see everything.
Chunks of prompts it reads in the launch that the large model does. What was drawn it reads when
drafts are wanted, so a step without drafts costs it nothing; how much that is the device knows, and
the host an upper bound (`unread`), which is all that a launch needs.

How many passes there are the plan says, before anything of the step before is known to the host:
so they are launched behind it like everything else, and none is in vain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from services.compute.kernels.drafts.draft_passes import DraftPasses, begin_drafts, keep_guesses
from services.compute.kernels.drafts.draft_tokens import SlotTexts, draft_tokens, remember_tokens
from services.compute.kernels.step.slot_words import SampleRows
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.kernels.step.step_deltas import apply_deltas
from services.compute.kernels.step.step_input import unpack_step
from services.compute.kv.transfer import Direction
from services.compute.runner.cuda.buckets import bucket_of, row_buckets
from services.compute.runner.cuda.drafter import Launch, MachineParts
from services.compute.runner.cuda.unread import FirstPass, Unread
from services.compute.runner.uploads import VARIANT, StepUpload
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.sampling.slots import Variant
from services.compute.step import Int32Array

BEGIN, AGREE, NO_GUESS = ("drafts",), ("agree",), ("no guess",)

READ_SIZES = (16, 64, 256, 1024, 2048)
"""Tokens of launches that read what is behind. One stream's hundred tokens are little beside the
weights, which are read once. Slots behind the largest launch are read with later steps, and have no
drafts until then: else one step would take as long as several."""

GUESSES = (Variant.PLAIN, Variant.CUTS, Variant.ADJUSTED)


class SlotDrafts(NamedTuple):
    """What is drafted for, and the texts of all slots."""

    passes: DraftPasses
    texts: SlotTexts


class Passes(Protocol):
    """What computes: by launches that can be captured."""

    @property
    def inputs(self) -> StepInputs:
        """The rows of a pass."""
        ...

    @property
    def first(self) -> FirstPass: ...

    @property
    def num_forms(self) -> int:
        """Of passes: the first, the second …; the last form is that of all further ones."""
        ...

    @property
    def num_heads(self) -> int:
        """That make logits, each of its form of passes; one may be that of all."""
        ...

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        """See `DeviceDrafter`, and of the next two."""
        ...

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None: ...

    def see(self, drafts: SlotDrafts, num_tokens: int, has_chunks: bool) -> None: ...

    def read(self, drafts: SlotDrafts, num_tokens: int) -> None:
        """Read what is behind, so many tokens at most."""
        ...

    def compute(self, drafts: SlotDrafts, form: int, num_rows: int) -> None:
        """The next pass, which is of this form."""
        ...

    def logits(self, head: int, num_samples: int) -> Tensor:
        """Float32 logits [S, V] of the pass, as wide as the large model's."""
        ...

    def ask(self, num_tokens: int, num_samples: int) -> None:
        """Go through the products of a pass of so many rows, and of so many logits if any."""
        ...


PassesMaker: TypeAlias = Callable[[MachineParts], Passes]


class PassDrafter:
    """Drafts with what computes them."""

    def __init__(self, make_passes: PassesMaker, machine: MachineParts) -> None:
        sizes, device = machine.sizes, machine.packed.device
        self._machine, self._computing = machine, make_passes(machine)
        self._drafts = SlotDrafts(
            DraftPasses.make(sizes.max_rows, sizes.max_rows, device),
            SlotTexts.make(sizes.max_rows, sizes.max_positions, device),
        )
        self._row_buckets = row_buckets(sizes.max_rows)
        self._guess_buckets = row_buckets(max(sizes.max_rows // 2, 1))
        fitting = [size for size in READ_SIZES if size < sizes.max_tokens]
        self._read_sizes = tuple(fitting) or (sizes.max_tokens,)
        about = self._computing.first, machine.rule.num_drafts
        self._unread = Unread(sizes.max_rows, self._read_size, *about)

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        self._computing.attach(num_pages, num_host_pages)

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        return self._computing.sides(direction)

    def enter(self, packed: Tensor) -> None:
        passes, texts = self._drafts
        remember_tokens(packed, texts, passes.read_N)

    def see(self, num_tokens: int, has_chunks: bool) -> None:
        self._computing.see(self._drafts, num_tokens, has_chunks)

    def follow(self, rows: SampleRows, said_NV: Tensor, result_SW: Tensor) -> None:
        machine, (passes, texts) = self._machine, self._drafts
        about = rows, machine.inputs, machine.resident, texts, said_NV, machine.rule
        draft_tokens(*about, result_SW, passes.read_N)

    def launches(self, sampler: DeviceSampler) -> Iterator[Launch]:
        yield BEGIN, self._begin
        for size in reversed(self._read_sizes) if self._computing.first.reads else ():
            yield ("read", size), partial(self._read, size)
        for form in range(self._computing.num_forms):
            for size in reversed(self._row_buckets):
                yield ("draft", form, size), partial(self._pass, form, size)
        for head, variant in itertools.product(range(self._computing.num_heads), GUESSES):
            for size in reversed(self._guess_buckets):
                guess = partial(self._guess, sampler, head, variant, size)
                yield ("guess", head, variant, size), guess
        if self._computing.first.num_layers > 1:
            yield NO_GUESS, self._go_on
        if self._machine.decoder.is_split:
            yield AGREE, self._agree

    def ask(self, num_tokens: int) -> None:
        if num_tokens <= self._row_buckets[-1]:
            num_samples = num_tokens if num_tokens <= self._guess_buckets[-1] else 0
            self._computing.ask(num_tokens, num_samples)

    def draft(self, ints: Int32Array, header: list[int]) -> None:
        work = self._unread.follow(StepUpload.read(ints))
        if not work.num_slots:
            return
        replay = self._machine.stream.replay
        variant = min(Variant(header[VARIANT]), Variant.ADJUSTED)
        replay(BEGIN)
        if work.num_read:
            replay(("read", work.num_read))
        num_reading = self._computing.first.num_layers
        for number in range(max(num_reading, len(work.num_slots))):
            count = work.num_slots[number] if number < len(work.num_slots) else 0
            num_rows = work.num_rows if number < num_reading else count
            form = min(number, self._computing.num_forms - 1)
            replay(("draft", form, bucket_of(num_rows, self._row_buckets)))
            if count:
                head = min(number, self._computing.num_heads - 1)
                replay(("guess", head, variant, bucket_of(count, self._guess_buckets)))
            else:
                replay(NO_GUESS)
        if self._machine.decoder.is_split:
            replay(AGREE)

    def _read_size(self, num_tokens: int) -> int:
        return bucket_of(min(num_tokens, self._read_sizes[-1]), self._read_sizes)

    @torch.inference_mode()
    def _begin(self) -> None:
        """The rows of the step are unpacked here and, with their drafts, once more."""
        packed, inputs, resident, sizes, *_ = self._machine
        apply_deltas(packed, resident)
        unpack_step(packed, resident, inputs, sizes.max_rows, sizes.page_tokens)
        begin_drafts(inputs, resident, self._drafts.passes)

    @torch.inference_mode()
    def _read(self, num_tokens: int) -> None:
        self._computing.read(self._drafts, num_tokens)

    @torch.inference_mode()
    def _pass(self, form: int, num_rows: int) -> None:
        self._computing.compute(self._drafts, form, num_rows)

    @torch.inference_mode()
    def _guess(self, sampler: DeviceSampler, head: int, variant: Variant, size: int) -> None:
        inputs = self._computing.inputs
        result_SW = sampler.guess(variant, self._computing.logits(head, size), inputs)
        keep_guesses(inputs, self._machine.resident, self._drafts.passes, result_SW)

    @torch.inference_mode()
    def _go_on(self) -> None:
        """A pass is behind whose rows no draft is wanted of."""
        self._drafts.passes.state[1:2].add_(1)

    @torch.inference_mode()
    def _agree(self) -> None:
        """Ranks have a drafter each, whose products may have been chosen otherwise, so that drafts
        may differ; and all have to compute the same rows."""
        self._machine.decoder.agree(self._machine.resident.drafts_NK)
