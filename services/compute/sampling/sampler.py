"""From logits to the next token of every sampled row, in plain torch.

Order: penalties, logit bias, mask of early stops, masks of structured samples, temperature, top_k,
top_p, min_p, then the largest of logits plus noise. What no row of the step asks for is not done.
Every operation is exact or works on one element alone, so that a row's token does not change with
its batch.

Shape legend: S samples, V vocabulary, R those of the samples that need one treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.messages.tokens import TokenLogprobs
from services.compute.kernels.sampling.slot_entries import read_entries
from services.compute.kernels.step import slot_words as words
from services.compute.sampling.logits_processors import (
    PenaltyRows,
    apply_min_p,
    apply_top_k,
    apply_top_p,
)
from services.compute.sampling.logprobs import RawLogprobs
from services.compute.sampling.noise import coordinates, draw_where_it_counts
from services.compute.sampling.rejection import (
    ACCEPTANCE,
    DRAFT,
    RESIDUAL,
    Rejection,
    draw_or_reject,
)
from services.compute.sampling.slots import SamplingSlots
from services.compute.step import Int32Array, Int64Array, TokenMasks


class DraftRows(NamedTuple):
    """How many drafts of its slot, the rows before it, lie behind each sample, and its own."""

    number_S: Int64Array
    draft_S: Int64Array

    def before(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Of some samples all drafts up to their own: which sample of these, and the draft."""
        numbers = self.number_S[samples]
        places = np.repeat(np.arange(len(samples)), numbers)
        back = np.arange(len(places)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        drafts = self.draft_S[samples[places] - back]
        there = drafts >= 0
        return places[there], drafts[there]

    def behind(self) -> Int64Array:
        """The draft behind each sample; below 0 for none."""
        behind_S = np.full_like(self.draft_S, -1)
        behind_S[:-1] = np.where(self.number_S[1:] > 0, self.draft_S[1:], -1)
        return behind_S


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens_S: Tensor  # int64
    finite_S: Tensor  # bool
    logprobs: dict[int, tuple[TokenLogprobs, ...]]


class Sampler:
    """Draws tokens by each slot's settings."""

    def __init__(self, num_slots: int, vocab_size: int, rejects: bool = False) -> None:
        """With `rejects` drafts are drawn apart from tokens, as `sampling.rejection` says."""
        self._slots = SamplingSlots(num_slots)
        self._rejection = Rejection() if rejects else None
        self._penalties = PenaltyRows(vocab_size)

    def enter(self, packed: Int32Array) -> None:
        """Sequences bring what their words do not hold, as `slot_entries` packs it; their slots'
        former counts, bias and stop ids go."""
        for entry in read_entries(packed):
            self._slots.enter(entry)
            if entry.counted:
                self._penalties.place(entry.slot, entry.prompt_ids, entry.output_ids)

    def take(self, slot_rows: Int32Array) -> None:
        """Sequences take their slots, after their entries; rows [N, 1+W] are slots and words."""
        self._slots.take(slot_rows)
        for slot in slot_rows[:, 0][slot_rows[:, 1 + words.FLAGS] & words.PENALISED == 0].tolist():
            self._penalties.release(slot)

    def sample(
        self,
        logits_SV: Tensor,
        slots: Int64Array,
        indices: Int64Array,
        masks: TokenMasks | None = None,
        drafts: DraftRows | None = None,
    ) -> Sampled:
        """Draw output number indices[s] of slot slots[s]; overwrites the logits.

        What is drawn for skipped samples means nothing and is not counted. With drafts nothing is:
        that is for `count`, when it is known which of them were right.
        """
        settings = self._slots
        # a sum is finite if all are (short of 1e33), at a fortieth of the cost of looking at each
        finite_S = logits_SV.sum(dim=-1).isfinite()
        raw = RawLogprobs.of(logits_SV, settings.num_logprobs[slots])
        penalised = np.nonzero(settings.asks(slots, words.PENALISED))[0]
        count_rows = None
        if len(penalised):
            drafted = None if drafts is None else drafts.before(penalised)
            count_rows = self._penalise(logits_SV, penalised, slots[penalised], drafted)
        self._bias(logits_SV, slots)
        self._mask_early_stops(logits_SV, slots, indices)
        if masks is not None and len(masks.samples):
            self._mask(logits_SV, masks)
        if masks is not None and len(masks.forced_samples):
            where = torch.from_numpy(masks.forced_samples), torch.from_numpy(masks.forced_tokens)
            forced = logits_SV[where]
            logits_SV[where[0]] = -torch.inf
            logits_SV[where] = forced
        tokens_S = self._draw(logits_SV, slots, indices)
        if drafts is not None and self._rejection is not None:
            self._reject(self._rejection, tokens_S, logits_SV, slots, indices, drafts)
        if count_rows is not None and drafts is None:
            if masks is not None and masks.skipped:
                drawn = ~np.isin(penalised, masks.skipped)
                penalised, count_rows = penalised[drawn], count_rows[torch.from_numpy(drawn)]
            self._penalties.count(count_rows, tokens_S[torch.from_numpy(penalised)])
        return Sampled(tokens_S, finite_S, {} if raw is None else raw.pick(tokens_S))

    def count(self, slots: Int64Array, tokens: Int64Array) -> None:
        """These tokens of slots were drawn, which later penalties know."""
        penalised = np.nonzero(self._slots.asks(slots, words.PENALISED))[0]
        if len(penalised):
            rows = torch.from_numpy(self._penalties.rows_of(slots[penalised].tolist()))
            self._penalties.count(rows, torch.from_numpy(tokens[penalised]))

    def guess(
        self, logits_SV: Tensor, slots: Int64Array, indices: Int64Array, drafted_SK: Int64Array
    ) -> Tensor:
        """Draw the same from a drafter's logits, behind these drafts; nothing is counted.

        Overwrites the logits.
        """
        penalised = np.nonzero(self._slots.asks(slots, words.PENALISED))[0]
        if len(penalised):
            some_RK = drafted_SK[penalised]
            drafted = np.repeat(np.arange(len(some_RK)), some_RK.shape[1]), some_RK.ravel()
            self._penalise(logits_SV, penalised, slots[penalised], drafted)
        self._bias(logits_SV, slots)
        self._mask_early_stops(logits_SV, slots, indices)
        if self._rejection is None:
            return self._draw(logits_SV, slots, indices)
        number = drafted_SK.shape[1]
        if not number:
            self._rejection.forget()
        drawn = np.nonzero(self._slots.temperature[slots] > 0.0)[0]
        if len(drawn):
            log_q_RV = self._scaled(logits_SV[torch.from_numpy(drawn)], slots[drawn])
            self._rejection.keep(slots[drawn], number, log_q_RV.log_softmax(dim=-1))
        return self._draw(logits_SV, slots, indices, stream=DRAFT)

    def _reject(
        self,
        rejection: Rejection,
        tokens_S: Tensor,
        logits_SV: Tensor,
        slots: Int64Array,
        indices: Int64Array,
        drafts: DraftRows,
    ) -> None:
        """Draw again where there is a draft behind, with what that was drawn from."""
        behind_S = drafts.behind()
        is_known_S = (behind_S >= 0) & rejection.knows(slots, drafts.number_S)
        rows = np.nonzero(is_known_S)[0]
        if not len(rows):
            return
        index, slots_R = torch.from_numpy(rows), slots[rows]
        tokens_S[index] = draw_or_reject(
            self._scaled(logits_SV[index], slots_R).log_softmax(dim=-1),
            rejection.take(slots_R, drafts.number_S[rows]),
            torch.from_numpy(behind_S[rows]),
            self._where(slots_R, indices[rows], ACCEPTANCE),
            self._where(slots_R, indices[rows], RESIDUAL),
        )

    def _penalise(
        self,
        logits_SV: Tensor,
        samples: Int64Array,
        slots: Int64Array,
        drafted: tuple[Int64Array, Int64Array] | None,
    ) -> Tensor:
        rows = torch.from_numpy(self._penalties.rows_of(slots.tolist()))
        index = torch.from_numpy(samples)
        settings = self._slots
        logits_SV[index] = self._penalties.apply(
            logits_SV.index_select(0, index),
            rows,
            (settings.presence[slots], settings.frequency[slots], settings.repetition[slots]),
            drafted,
        )
        return rows

    def _bias(self, logits_SV: Tensor, slots: Int64Array) -> None:
        samples = np.nonzero(self._slots.asks(slots, words.BIASED))[0]
        if not len(samples):
            return
        values = np.concatenate([self._slots.bias_values[slot] for slot in slots[samples]])
        where = self._pairs(samples, [self._slots.bias_ids[slot] for slot in slots[samples]])
        logits_SV.index_put_(where, torch.from_numpy(values), accumulate=True)

    def _mask_early_stops(self, logits_SV: Tensor, slots: Int64Array, indices: Int64Array) -> None:
        early = indices < self._slots.min_tokens[slots]
        samples = np.nonzero(early & self._slots.asks(slots, words.HAS_STOPS))[0]
        if not len(samples):
            return
        where = self._pairs(samples, [self._slots.stop_ids[slot] for slot in slots[samples]])
        logits_SV.index_put_(where, torch.full((), -torch.inf))

    def _mask(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        bytes_G = np.ascontiguousarray(masks.bits).view(np.uint8)
        there_GV = np.unpackbits(bytes_G, axis=1, bitorder="little", count=logits_SV.shape[1])
        index = torch.from_numpy(masks.samples.astype(np.int64))
        barred_GV = torch.from_numpy(there_GV == 0)
        logits_SV[index] = logits_SV.index_select(0, index).masked_fill_(barred_GV, -torch.inf)

    def _draw(
        self, logits_SV: Tensor, slots: Int64Array, indices: Int64Array, stream: int = 0
    ) -> Tensor:
        drawn = np.nonzero(self._slots.temperature[slots] > 0.0)[0]
        if not len(drawn):
            return logits_SV.argmax(dim=-1)
        if len(drawn) == len(slots):
            return self._draw_noisy(logits_SV, slots, indices, stream)
        index = torch.from_numpy(drawn)
        tokens_S = logits_SV.argmax(dim=-1)
        tokens_S[index] = self._draw_noisy(
            logits_SV.index_select(0, index), slots[drawn], indices[drawn], stream
        )
        return tokens_S

    def _draw_noisy(
        self, logits_RV: Tensor, slots: Int64Array, indices: Int64Array, stream: int
    ) -> Tensor:
        where_4R = self._where(slots, indices, stream)
        return draw_where_it_counts(self._scaled(logits_RV, slots), where_4R)

    def _where(self, slots: Int64Array, indices: Int64Array, stream: int) -> Tensor:
        """Where rows stand in the noise."""
        settings = self._slots
        choices = settings.choice[slots].astype(np.int64) + stream
        return coordinates(settings.seed[slots], choices, indices)

    def _scaled(self, logits_RV: Tensor, slots: Int64Array) -> Tensor:
        """By the temperature, and without what is cut."""
        settings = self._slots
        temperature = torch.from_numpy(settings.temperature[slots])[:, None]
        # the maximum goes to 0 first, where float32 is finest and no division overflows
        logits_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)).div_(temperature)
        for cut, values, flag in (
            (apply_top_k, settings.top_k, words.CUTS_TOP_K),
            (apply_top_p, settings.top_p, words.CUTS_TOP_P),
            (apply_min_p, settings.min_p_log, words.CUTS_MIN_P),
        ):
            self._cut(cut, logits_RV, values[slots], settings.asks(slots, flag))
        return logits_RV

    def _cut(
        self,
        cut: Callable[[Tensor, Any], None],
        logits_RV: Tensor,
        values: npt.NDArray[Any],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        if not wanted.any():
            return
        if wanted.all():
            cut(logits_RV, values)
            return
        index = torch.from_numpy(np.nonzero(wanted)[0])
        some_RV = logits_RV.index_select(0, index)
        cut(some_RV, values[wanted])
        logits_RV[index] = some_RV

    def _pairs(self, samples: Int64Array, ids: Sequence[Int64Array]) -> tuple[Tensor, Tensor]:
        counts = np.array([len(some) for some in ids])
        return torch.from_numpy(np.repeat(samples, counts)), torch.from_numpy(np.concatenate(ids))
