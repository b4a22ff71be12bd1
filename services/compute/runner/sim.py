"""The `sim` runner: no model, a virtual device that takes time and a scripted source of tokens.

It stands in for a device when router, scheduler and ring are loaded with more streams than a model
on this machine could feed. It knows nothing of text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from pathlib import Path

import numpy as np

from common.messages.tokens import TokenLogprobs
from common.model_folder import describe, eos_token_ids, read_json, read_pooling
from common.tokenizer_file import read_tokenizer
from services.compute.config import ComputeSettings
from services.compute.kv.memory import KVGroup
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.protocol import RunnerSpec
from services.compute.step import (
    Float32Array,
    Int32Array,
    RowScores,
    SlotDelta,
    StepPlan,
    StepResult,
    TokenMasks,
)

LOG_HALF = log(0.5)
EMBEDDING_SIZE = 64  # for a folder that does not name its model's


def sim_scores(plan: StepPlan, vocab_size: int) -> dict[int, RowScores]:
    """Every target is the likeliest token, with half of the probability; those after it in the
    vocabulary follow with half of the rest each."""
    scores = {}
    for score in plan.scores:
        count, num_top = len(score.targets), min(score.num_top, vocab_size)
        ranks = np.arange(num_top, dtype=np.int32)
        scores[score.row] = RowScores(
            np.full(count, LOG_HALF, dtype=np.float32),
            np.ones(count, dtype=np.int32),
            (score.targets[:, None] + ranks) % np.int32(vocab_size),
            np.tile((ranks + 1).astype(np.float32) * np.float32(LOG_HALF), (count, 1)),
        )
    return scores


def sim_embeddings(plan: StepPlan, size: int) -> dict[int, Float32Array]:
    """Directions that follow from a prompt's length and last token, so that neither chunks nor
    shared prefixes change them."""
    embeddings = {}
    end_R = np.add.accumulate(plan.q_len)
    for pool in plan.pools:
        if pool.ends:
            last = int(plan.tokens[end_R[pool.row] - 1])
            draw = np.random.default_rng((last, int(plan.pos_upper[pool.row])))
            vector_E = draw.standard_normal(size, dtype=np.float32)
            embeddings[pool.row] = vector_E / np.linalg.norm(vector_E)
    return embeddings


CLOSING = ('"}', '"]', '"', "}", "]", ",", ":", "0")
DEFAULT_MODEL_LEN = 4096  # for a folder that does not name its model's
DEFAULT_KV_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Device seconds of a step: base + decode rows x per_row_s + prefill tokens x per_token_s."""

    base_s: float
    per_row_s: float
    per_token_s: float

    def step_s(self, plan: StepPlan) -> float:
        num_prefill_tokens = plan.num_tokens - plan.num_decode_rows
        return (
            self.base_s
            + plan.num_decode_rows * self.per_row_s
            + num_prefill_tokens * self.per_token_s
        )


@dataclass(frozen=True, slots=True)
class SimTicket:
    """A step on the virtual device: when it runs and what it samples."""

    plan: StepPlan
    sampled: tuple[SlotDelta, ...]  # [S]
    start_s: float
    end_s: float
    masks: TokenMasks | None = None


class TokenScript:
    """The tokens of a sequence: they count through the vocabulary from a start that the seed gives.

    Under a mask the next allowed token is taken. That would seldom satisfy a grammar, so every
    fourth token is, where the mask allows it, one that ends the text or one of `closing_ids`.
    """

    def __init__(self, spec: RunnerSpec, closing_ids: tuple[int, ...]) -> None:
        self._vocab_size = spec.vocab_size
        self._eos_token_ids = spec.eos_token_ids
        self._closing_ids = closing_ids

    def token(self, delta: SlotDelta, index: int) -> int:
        """The output of this number; never one that ends the text."""
        vocab_size = self._vocab_size
        start = (delta.sampling.seed * 0x9E3779B1 + delta.choice * 7919) % vocab_size
        token = (start + index) % vocab_size
        while token in delta.stop_ids or token in self._eos_token_ids:
            token = (token + 1) % vocab_size
        return token

    def allowed_token(self, delta: SlotDelta, index: int, token: int, mask_W: Int32Array) -> int:
        """The same under a mask, where `token` is what it would be without."""
        grammar_spec = delta.sampling.grammar_spec
        if grammar_spec and grammar_spec.grammar and (index + delta.sampling.seed) % 4 == 3:
            for closing in (*delta.stop_ids, *self._closing_ids):
                if mask_W[closing // 32] >> closing % 32 & 1:
                    return closing
        words = np.flatnonzero(mask_W)
        if not len(words):
            return token
        at = int(words.searchsorted(token // 32))
        ends = {*delta.stop_ids, *self._eos_token_ids}
        last = token
        for number in range(len(words) + 1):
            word = int(words[(at + number) % len(words)])
            bits = int(mask_W[word]) & 0xFFFFFFFF
            lowest = token % 32 if number == 0 and word == token // 32 else 0
            for bit in range(lowest, 32):
                if bits >> bit & 1:
                    last = 32 * word + bit
                    if last not in ends:
                        return last
        return last


class SimRunner:
    """A device that is busy until a computed time, with tokens that follow from seed and index.

    The device keeps its own clock: a step starts when the one before ends, or when it is launched
    if that is later. So timers that overshoot cost host time, as they would beside a real device,
    and never device time.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        latency: LatencyModel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        closing_ids: tuple[int, ...] = (),
        embedding_size: int = EMBEDDING_SIZE,
    ) -> None:
        self._spec = spec
        self._embedding_size = embedding_size
        self._latency = latency
        self._clock = clock
        self._sleep = sleep
        self._busy_until_s = 0.0
        self._script = TokenScript(spec, closing_ids)
        self._slots: dict[int, SlotDelta] = {}

    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, plan: StepPlan) -> SimTicket:
        """Put the step on the device's timeline; returns at once."""
        for delta in plan.slots:
            self._slots[delta.slot] = delta
        sampled = tuple(self._slots[slot] for slot in plan.row_slot[plan.sample_row].tolist())
        start_s = max(self._clock(), self._busy_until_s)
        self._busy_until_s = start_s + self._latency.step_s(plan)
        return SimTicket(plan, sampled, start_s, self._busy_until_s)

    def go_on(self, ticket: SimTicket) -> bool:
        return True

    def sample(self, ticket: SimTicket, masks: TokenMasks | None = None) -> SimTicket:
        """Take the masks; sampling is part of the step's time, but for what it waited for them."""
        if masks is None:
            return ticket
        self._busy_until_s = max(ticket.end_s, self._clock())
        return replace(ticket, masks=masks, end_s=self._busy_until_s)

    def ready(self, ticket: SimTicket) -> bool:
        return self._clock() >= ticket.end_s

    def result(self, ticket: SimTicket) -> StepResult:
        """Wait until the device has ended the step and return its scripted tokens."""
        remaining_s = ticket.end_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
        indices = ticket.plan.sample_index.tolist()
        tokens = list(map(self._script.token, ticket.sampled, indices))
        if ticket.masks is not None:
            for sample, mask_W in zip(
                ticket.masks.samples.tolist(), ticket.masks.bits, strict=True
            ):
                delta, index = ticket.sampled[sample], indices[sample]
                tokens[sample] = self._script.allowed_token(delta, index, tokens[sample], mask_W)
        num_samples = len(tokens)
        return StepResult(
            step_id=ticket.plan.step_id,
            tokens=np.array(tokens, dtype=np.int32).reshape(num_samples, 1),
            n_valid=np.ones(num_samples, dtype=np.int32),
            nonfinite=np.zeros(num_samples, dtype=np.bool_),
            logprobs=self._logprobs(ticket.sampled, tokens),
            device_start_s=ticket.start_s,
            device_end_s=ticket.end_s,
            scores=sim_scores(ticket.plan, self._spec.vocab_size) if ticket.plan.scores else {},
            embeddings=sim_embeddings(ticket.plan, self._embedding_size)
            if ticket.plan.pools
            else {},
        )

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        """Nothing: its pages hold nothing, and copies take no time beside its steps."""

    def transferred(self, ticket: None) -> bool:
        return True

    def expert_counters(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _logprobs(
        self, sampled: tuple[SlotDelta, ...], tokens: list[int]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Halving probabilities from the chosen token on, for samples that ask for logprobs."""
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for sample, (delta, token) in enumerate(zip(sampled, tokens, strict=True)):
            num_top = delta.sampling.num_logprobs
            if num_top >= 0:
                ids = tuple((token + i) % self._spec.vocab_size for i in range(num_top))
                values = tuple((i + 1) * LOG_HALF for i in range(num_top))
                logprobs[sample] = (TokenLogprobs(LOG_HALF, ids, values),)
        return logprobs


def closing_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Tokens that help to complete JSON, those that close most first; none without a tokenizer.

    They are generated only under a mask.
    """
    vocabulary = read_tokenizer(folder).get("model", {}).get("vocab", {})
    if not isinstance(vocabulary, dict):
        return ()
    ids = [vocabulary.get(text, vocab_size) for text in CLOSING]
    return tuple(token for token in ids if token < vocab_size)


def load(folder: Path, settings: ComputeSettings) -> SimRunner:
    """Make the virtual device for the model in a folder, of which only its sizes matter."""
    card, pooling = describe(folder), read_pooling(folder)
    hidden_size = read_json(folder, "config.json").get("hidden_size")
    max_model_len = settings.max_model_len or card.max_model_len or DEFAULT_MODEL_LEN
    kv_tokens = settings.max_batched_token_mem or min(
        settings.max_num_seqs * max_model_len, DEFAULT_KV_TOKENS
    )
    spec = RunnerSpec(
        vocab_size=card.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids(folder),
        kv_groups=(KVGroup("full", 1, settings.page_tokens, 0),),
        num_pages=max(1, kv_tokens // settings.page_tokens),
        num_host_pages=0,
        max_num_seqs=settings.max_num_seqs,
        max_step_tokens=settings.max_num_seqs + (settings.max_prefill_tokens or 8192),
        stall_after_s=5.0,
        pooling="" if pooling is None else pooling.kind,
    )
    latency = LatencyModel(
        settings.sim_step_base_s, settings.sim_step_per_row_s, settings.sim_step_per_token_s
    )
    return SimRunner(
        spec,
        latency,
        closing_ids=closing_ids(folder, card.vocab_size),
        embedding_size=hidden_size if isinstance(hidden_size, int) else EMBEDDING_SIZE,
    )
