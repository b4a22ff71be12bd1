"""The device's side of a step: the one upload, what it is unpacked into, and what stays by slot.

CUDA graphs hold addresses, not tensors, so buffers are made once and filled anew for each step.

An upload is a buffer of int32: a header of counts, then sections without gaps, in this order:

    row_slot[R-P]  chunk_start[C]  token_start[C]  tokens[T-D]  sample_row[S-D]  sample_index[S-D]
    states[4, E]  page_slot[Y]  page_index[Y]  page_id[Y]  slot_rows[N, 1+W]  drafts[2, F]

so that each section's start follows from the counts alone. The first P rows are those of the
upload before: their slots are on the device. The first D rows decode: one token each, all of
them sampled, and their tokens, positions and output indices are resident. The C = R - D rows
behind them are chunks of prompts. A steady step of decode rows is a header and nothing else.

A row_slot has above bit NUMBER_SHIFT how many drafts lie between the slot's last token and the
row's input (`runner.draft_rows`): 0 for all but draft rows.

`states` are columns: slot, length, output index, last token of sequences that decode from here on
without a chunk that the device has sampled. `drafts` are those that the host gives: the row_slot of
their rows, and tokens. A slot row is a slot and its words. A page_slot has
the cache group of its entry above bit GROUP_SHIFT. Behind the sections, and not on the device,
follows what the host needs to launch the step (`runner.uploads`).

Shape legend: R rows, P of which are kept, D decode rows, C chunks, T tokens, S samples, E states,
Y page-table entries, N slots or slot rows, L pages of the longest sequence, W words of a slot,
G cache groups, F given drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.step.span import FULL, AttentionSpan

HEADER_INTS = 16
(
    NUM_ROWS,
    NUM_DECODE_ROWS,
    NUM_TOKENS,
    NUM_SAMPLES,
    NUM_PAGE_ENTRIES,
    NUM_SLOT_ROWS,
    NUM_KEPT_ROWS,
    NUM_STATES,
) = range(8)
"""Places in the header; the first four are those of `StepInputs.counts`."""

NUM_GIVEN_DRAFTS = 14
"""The place of another count; the rest is the host's, but for the last."""

NUM_OWN = 15
"""Where ranks share the tokens of a step: so many of them, the last ones, are this rank's own, and
every other rank has as many others (`distributed.context`). 0: all have the same."""

GROUP_SHIFT = NUMBER_SHIFT = 24
"""Slots are below 2^24; groups, and the numbers of draft rows, below 2^7."""

SLOT_MASK = (1 << GROUP_SHIFT) - 1


class Sections(NamedTuple):
    """Where each section of an upload starts, and where the last one ends."""

    row_slot: int
    chunk_start: int
    token_start: int
    tokens: int
    sample_row: int
    sample_index: int
    states: int
    page_slot: int
    page_index: int
    page_id: int
    slot_rows: int
    drafts: int
    end: int

    @staticmethod
    def of(header: Sequence[int], num_words: int) -> Sections:
        rows, decodes, tokens, samples, entries, slot_rows, kept, states = header[:8]
        chunks = rows - decodes
        sizes = (
            *(rows - kept, chunks, chunks, tokens - decodes, samples - decodes, samples - decodes),
            *(4 * states, entries, entries, entries, slot_rows * (1 + num_words)),
            2 * header[NUM_GIVEN_DRAFTS],
        )
        return Sections(*accumulate((HEADER_INTS, *sizes)))


NUM_COUNTS = 8  # of which four are used: the host tells kernels nothing else of a step's sizes
NO_SLOT = -1


class StepInputs(NamedTuple):
    """One step, unpacked. Beyond the counted sizes lies padding up to the bucket."""

    counts: Tensor  # int32 [NUM_COUNTS]
    tokens_T: Tensor  # int32; padding 0
    positions_T: Tensor  # int32; padding 0
    kv_slots_GT: Tensor  # int64, page * page_tokens + offset; padding -1: nothing is stored
    row_slot_R: Tensor  # int32
    q_start_R: Tensor  # int32, position of the row's first query
    q_len_R: Tensor  # int32
    token_start_R: Tensor  # int32, the row's first token
    sample_token_S: Tensor  # int32, the token whose logits are sampled; padding 0
    sample_slot_S: Tensor  # int32; padding NO_SLOT
    sample_index_S: Tensor  # int32, output index; padding 0
    row_number_R: Tensor  # int32, of draft rows; of others 0

    @staticmethod
    def make(
        max_tokens: int,
        max_rows: int,
        device: torch.device,
        num_groups: int = 1,
        more_rows: int = 0,
    ) -> StepInputs:
        """More rows than `max_rows` are not sampled."""

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_rows = max_rows + more_rows
        return StepInputs(
            counts=ints(NUM_COUNTS),
            tokens_T=ints(max_tokens),
            positions_T=ints(max_tokens),
            kv_slots_GT=ints(num_groups, max_tokens, dtype=torch.int64).fill_(-1),
            row_slot_R=ints(num_rows),
            q_start_R=ints(num_rows),
            q_len_R=ints(num_rows),
            token_start_R=ints(num_rows),
            sample_token_S=ints(max_rows),
            sample_slot_S=ints(max_rows).fill_(NO_SLOT),
            sample_index_S=ints(max_rows),
            row_number_R=ints(num_rows),
        )


class Resident(NamedTuple):
    """What stays on the device from step to step, by slot.

    Lengths are the device's: a step reads them, and its sampling advances them by what it accepted.
    """

    page_table: Tensor  # int32 [G, N, L]
    length: Tensor  # int32 [N], positions computed before the next decode step: its position
    output_index: Tensor  # int32 [N], of the output token that comes next
    last_token: Tensor  # int32 [N], the token sampled last, the next step's input
    slot_params: Tensor  # int32 [N, W], sampling settings; floats by their bits
    drafts_NK: Tensor  # int32 [N, 1+K], guesses at what follows, then -1; the last is always -1

    @staticmethod
    def make(
        num_slots: int,
        max_pages: int,
        num_words: int,
        device: torch.device,
        num_groups: int = 1,
        num_drafts: int = 0,
    ) -> Resident:
        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Resident(
            page_table=table(num_groups, num_slots, max_pages),
            length=table(num_slots),
            output_index=table(num_slots),
            last_token=table(num_slots),
            slot_params=table(num_slots, num_words),
            drafts_NK=table(num_slots, 1 + num_drafts).fill_(-1),
        )


def page_stride(kv_pages: Tensor) -> int:
    """Elements from one page [2, K, P, D] to the next; each is contiguous.

    Compiled into kernels: as a run-time number it took 1 % of a 1B model's step of 64 rows.
    """
    assert kv_pages[0].is_contiguous()
    return kv_pages.stride(0)


class AttentionCall(NamedTuple):
    """One layer's attention. A token's heads are contiguous, its stride may be any.

    Shape legend: T tokens, H query heads, K kv heads, D head width, Y pages, P positions of a page,
    N slots, L pages of the longest sequence.
    """

    q_THD: Tensor
    kv_pages: Tensor  # [Y, 2, K, P, D]: a layer's part of pages, which is contiguous
    page_table_NL: Tensor  # int32, of the layer's cache group
    out_THD: Tensor
    scale: float  # positive
    span: AttentionSpan = FULL  # of positions that a query sees
    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap) (Gemma 2); 0: it stays
    kv_scales: Tensor | None = None  # bfloat16 [Y, 2, K, P], of quantized pages
    sinks_H: Tensor | None = None  # float32, a logit in every softmax that has no value (gpt-oss)
    kv_slots_T: Tensor | None = None  # int64, where the step's keys and values have been stored
