"""Sampling's kernels at S samples and V = 128256, each with the bytes it must read and write once.

Predicted on an H200, in a graph, µs at S = 1 / 64 / 256. Logits that were just written lie in the
L2 cache at S = 64 and below, as they do in serving.

draw, greedy            5 /  14 /  35   reads the logits once; two launches
draw, temperature 1     6 /  25 /  75   55 instructions of noise an id
draw after a cut        6 /  14 /  40   noise only in parts with ids left
cut, top_p             22 /  50 / 165   5 launches, of which two read all (see cuts.py)
cut, top_k 50          22 /  40 / 130
adjust, penalties       4 /  20 /  70   reads logits and counts, writes logits
adjust, mask of bits    4 /  15 /  55   reads logits and 16 KB of bits a row, writes logits
logprobs, 20 of them   12 /  25 /  80   20 maxima of each part of 4096 ids
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.case import Case
from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.kernels.sampling.logits_processors import ProcessorTables, process_logits
from services.compute.kernels.sampling.logprobs import RESULT_WORDS, LogprobScratch, logprobs
from services.compute.kernels.sampling.sample import SampleScratch, sample_tokens
from services.compute.kernels.sampling.top_k_top_p import TopKTopPScratch, top_k_top_p
from services.compute.kernels.step.slot_words import (
    NUM_WORDS,
    MaskRows,
    ProcessedLogits,
    SampleRows,
)
from services.compute.kernels.step.step_buffers import NUM_SAMPLES, Resident
from services.compute.sampling.slots import slot_words
from services.compute.step import SlotDelta

VOCAB_SIZE = 128256
SAMPLES = (1, 64, 256)
PLAIN = SamplingParams(max_tokens=100, seed=1)
PENALTIES = replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.1, repetition_penalty=1.1)
STRUCTURED = replace(PLAIN, grammar_spec=GrammarSpec(grammar="start: /a/"))
CUTS = {
    "top_p 0.95": replace(PLAIN, top_p=0.95),
    "top_k 50": replace(PLAIN, top_k=50),
    "top_k 20 top_p 0.8": replace(PLAIN, top_k=20, top_p=0.8),
    "none asked": PLAIN,
}


def cases() -> Iterator[Case]:
    """Every kernel at every number of samples."""
    for samples in SAMPLES:
        bench = Bench.make(samples)
        row = 4.0 * samples * VOCAB_SIZE
        for name, sampling in (("greedy", replace(PLAIN, temperature=0.0)), ("warm", PLAIN)):
            yield Case(f"draw {name} S={samples}", bench.draws(sampling, None), row)
        for name, sampling in CUTS.items():
            for spread in (1.0, 3.0):
                runs = bench.cuts(sampling, spread)
                size = row if name != "none asked" else 0.0
                yield Case(f"cut {name} spread={spread:.0f} S={samples}", runs, size)
        runs = bench.draws(CUTS["top_p 0.95"], bench.shaped_after_cut(CUTS["top_p 0.95"]))
        yield Case(f"draw after top_p S={samples}", runs, row)
        yield Case(f"adjust penalties S={samples}", bench.adjusts(PENALTIES), 3 * row)
        size = 2 * row + row / 32
        yield Case(f"adjust mask S={samples}", bench.adjusts(STRUCTURED), size)
        yield Case(f"adjust none asked S={samples}", bench.adjusts(PLAIN), 0.0)
        for count in (0, 5, 20):
            runs = bench.logprobs(replace(PLAIN, num_logprobs=count))
            yield Case(f"logprobs {count} S={samples}", runs, row)


@dataclass(frozen=True, slots=True)
class Bench:
    """Tensors of one number of samples; logits are scaled as a case asks."""

    logits: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor
    shaped: ProcessedLogits
    result: torch.Tensor

    @staticmethod
    def make(samples: int) -> Bench:
        """As many sets of logits as do not all stay in the cache, where that can be."""
        slots = torch.arange(samples, device="cuda", dtype=torch.int32)
        counts = torch.zeros(8, device="cuda", dtype=torch.int32)
        counts[NUM_SAMPLES] = samples
        sets = 8 if samples == 1 else 3
        return Bench(
            tuple(torch.randn(samples, VOCAB_SIZE, device="cuda") for _ in range(sets)),
            slots,
            slots * 7,
            counts,
            ProcessedLogits.make(samples, samples, VOCAB_SIZE, torch.device("cuda")),
            torch.zeros((samples, RESULT_WORDS), device="cuda", dtype=torch.int32),
        )

    def rows(self, sampling: SamplingParams) -> SampleRows:
        """Every slot has these settings, and a seed of its own."""
        words = [
            slot_words(SlotDelta(slot, 0, replace(sampling, seed=slot), 0, ()), VOCAB_SIZE)
            for slot in range(len(self.slots))
        ]
        words_NW = torch.from_numpy(np.stack(words)).cuda()
        assert words_NW.shape[1] == NUM_WORDS
        return SampleRows(self.slots, self.indices, self.counts, words_NW)

    def draws(
        self, sampling: SamplingParams, shaped: ProcessedLogits | None
    ) -> list[Callable[[], None]]:
        """From the logits, or from what was cut of the first of them."""
        resident = Resident.make(len(self.slots), 1, NUM_WORDS, torch.device("cuda"))
        where = (self.rows(sampling), shaped, None, self.scratch(), resident, self.result)
        return [partial(sample_tokens, logits, *where) for logits in self.logits]

    def cuts(self, sampling: SamplingParams, spread: float) -> list[Callable[[], None]]:
        """Of logits of a normal distribution this wide."""
        scratch = TopKTopPScratch.make(len(self.slots), VOCAB_SIZE, torch.device("cuda"))
        where = (self.rows(sampling), scratch, self.shaped)
        return [partial(top_k_top_p, logits * spread, *where) for logits in self.logits]

    def shaped_after_cut(self, sampling: SamplingParams) -> ProcessedLogits:
        """What a draw finds after this cut."""
        self.cuts(sampling, 3.0)[0]()
        return self.shaped

    def adjusts(self, sampling: SamplingParams) -> list[Callable[[], None]]:
        """Of slots that have said nothing yet: the work is the same."""
        tables = ProcessorTables.make(len(self.slots), torch.device("cuda"))
        adjusted_SV = torch.empty_like(self.shaped.adjusted_SV)
        shaped = replace(self.shaped, adjusted_SV=adjusted_SV)
        masks = MaskRows.make(len(self.slots), VOCAB_SIZE, torch.device("cuda"))
        masks.row_of_S.copy_(self.slots)
        masks.bits_GM.random_(-(2**31), 2**31 - 1)
        where = (self.rows(sampling), tables, masks, shaped)
        return [partial(process_logits, logits, *where) for logits in self.logits]

    def logprobs(self, sampling: SamplingParams) -> list[Callable[[], None]]:
        """Of whatever was drawn last."""
        scratch = LogprobScratch.make(len(self.slots), VOCAB_SIZE, torch.device("cuda"))
        where = (self.rows(sampling), scratch, self.result)
        return [partial(logprobs, logits, *where) for logits in self.logits]

    def scratch(self) -> SampleScratch:
        """Room for the parts of a draw."""
        return SampleScratch.make(len(self.slots), VOCAB_SIZE, torch.device("cuda"))
