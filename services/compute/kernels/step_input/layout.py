"""Where everything of a step lies in its one upload, for the host that packs it and the device.

An upload is a buffer of int32: a header of counts, then sections without gaps, in this order:

    row_slot[R]  q_start[R]  token_start[R+1]  tokens[T]  sample_row[S]  sample_index[S]
    page_slot[D]  page_index[D]  page_id[D]  slot_rows[N, 1+W]

so that each section's start follows from the counts alone. token_start begins with 0 and ends
with T; a slot row is a slot and its words.

Shape legend: R rows, T tokens, S samples, D page-table entries, N slot rows, W words of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_INTS = 8
NUM_ROWS, NUM_DECODE_ROWS, NUM_TOKENS, NUM_SAMPLES, NUM_PAGE_ENTRIES, NUM_SLOT_ROWS = range(6)
"""Places in the header; the first four are those of `StepInputs.counts`. The rest is zero."""


@dataclass(frozen=True, slots=True)
class Sections:
    """Where each section of an upload starts, and where the last one ends."""

    row_slot: int
    q_start: int
    token_start: int
    tokens: int
    sample_row: int
    sample_index: int
    page_slot: int
    page_index: int
    page_id: int
    slot_rows: int
    end: int

    @staticmethod
    def of(counts: list[int], num_words: int) -> Sections:
        """Sections of an upload with these counts (a header's) and this many words a slot."""
        row_slot = HEADER_INTS
        q_start = row_slot + counts[NUM_ROWS]
        token_start = q_start + counts[NUM_ROWS]
        tokens = token_start + counts[NUM_ROWS] + 1
        sample_row = tokens + counts[NUM_TOKENS]
        sample_index = sample_row + counts[NUM_SAMPLES]
        page_slot = sample_index + counts[NUM_SAMPLES]
        page_index = page_slot + counts[NUM_PAGE_ENTRIES]
        page_id = page_index + counts[NUM_PAGE_ENTRIES]
        slot_rows = page_id + counts[NUM_PAGE_ENTRIES]
        return Sections(
            row_slot=row_slot,
            q_start=q_start,
            token_start=token_start,
            tokens=tokens,
            sample_row=sample_row,
            sample_index=sample_index,
            page_slot=page_slot,
            page_index=page_index,
            page_id=page_id,
            slot_rows=slot_rows,
            end=slot_rows + counts[NUM_SLOT_ROWS] * (1 + num_words),
        )
