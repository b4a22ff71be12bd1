"""Intake: from a request to sequences in the waiting queue, or to a terminal at once."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from itertools import chain

import numpy as np

from common.messages.address import AttemptId
from common.messages.arrays import MAX_CHOICES
from common.messages.failure import Failure
from common.messages.generate import Generate
from services.compute.kv.page_table import make_table
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.outputs import attempt_of, never_started
from services.compute.scheduler.sequence import Sequence, SequenceParams
from services.compute.scheduler.state import (
    SchedulerSettings,
    SchedulerState,
    most_at_once,
)
from services.compute.step import MAX_BIAS, MAX_STOP_IDS

MAX_PROMPT_LOGPROBS = 20  # of a token; what routers let in
MAX_BANNED_TOKENS = 16_384
GOES_ON = 1 << 62  # more than will ever arrive
ADVANCED = 1 << 40  # for each token that it has

NO_EMBEDDINGS = (
    "This model makes no embeddings: its folder does not say how (modules.json of "
    "sentence-transformers). Ask an embedding model."
)
EMBEDDINGS_ONLY = (
    "This model makes embeddings only: it has no head to generate text with. Use "
    "/v1/embeddings, or ask another model."
)


class Intake:
    """Every choice of a request gets exactly one terminal, here or later.

    A choice whose attempt is open already is passed over: its terminal is still to come.
    """

    def __init__(
        self, state: SchedulerState, spec: RunnerSpec, settings: SchedulerSettings
    ) -> None:
        self._state = state
        self._spec = spec
        self._max_waiting = settings.max_waiting
        self._capacity = state.memory.longest_sequence(
            spec.max_model_len, most_at_once(settings, spec)
        )
        self._prefix_cache = settings.prefix_cache
        self._num_arrived = 0

    def add_request(self, request: Generate, now_s: float) -> None:
        state = self._state
        choices = self._new_choices(request, now_s)
        if not choices:
            return
        failure = refusal(request, self._spec, self._capacity) or self._overload(request)
        if failure is not None:
            state.outputs.extend(
                never_started(request, attempt, "refused", failure) for attempt in choices.values()
            )
            return
        sequences = self._make_sequences(request, choices, now_s)
        ending = sequences[0].ending()
        # Of this retry's first try, only the terminal was lost, or scores of the prompt, too.
        if ending is not None and not sequences[0].has_to_score(0):
            for sequence in sequences:
                state.report(sequence, ending=ending)
            return
        leader, *followers = sequences
        for sequence in sequences:
            state.attempts.add(sequence)
            sequence.share.num_open += 1
        state.waiting.add(leader)
        state.forks.park(leader, followers)

    def _new_choices(self, request: Generate, now_s: float) -> dict[int, AttemptId]:
        """The choices that neither run already nor were aborted before, by number."""
        attempts = self._state.attempts
        choices: dict[int, AttemptId] = {}
        for index in range(min(max(request.num_choices, 1), MAX_CHOICES)):
            attempt = attempt_of(request, index)
            if attempts.get(attempt) is not None:
                continue
            if attempts.tombstones.is_buried(attempt, now_s):
                self._state.outputs.extend([never_started(request, attempt, "aborted", None)])
            else:
                choices[index] = attempt
        return choices

    def _make_sequences(
        self, request: Generate, choices: dict[int, AttemptId], now_s: float
    ) -> list[Sequence]:
        spec, share = self._spec, self._state.shares.of(request.client)
        drafts = spec.max_drafts, spec.max_ahead
        about = spec.eos_token_ids, spec.pooling, now_s, share, drafts
        params = SequenceParams(request, *about)
        params.predict(self._state.past_answers, spec.max_model_len)
        salt = request.cache_salt
        # Without a prefix cache only the request's own choices, and itself after a preemption, find
        # its pages.
        namespace: Hashable = salt if self._prefix_cache else (salt, request.attempt)
        sequences = []
        for index, attempt in choices.items():
            self._num_arrived += 1
            # What goes on has its turn before what has not begun, the most advanced first.
            num_outputs = len(request.output_ids)
            arrival = self._num_arrived - (GOES_ON + ADVANCED * num_outputs if num_outputs else 0)
            table = make_table(self._state.memory, namespace)
            choice = request.first_choice + index
            sequences.append(Sequence(attempt, params, choice, arrival, table))
        return sequences

    def _overload(self, request: Generate) -> Failure | None:
        """Refuse what the queue has no room for; an empty queue takes any request.

        Clients that have more open requests than this one give up places, if there are enough.
        """
        if request.output_ids:  # its client reads already, and routers bound what they let in
            return None
        state, share = self._state, self._state.shares.of(request.client)
        waiting, count = state.num_waiting, request.num_choices
        num_lacking = waiting + count - self._max_waiting
        if not waiting or num_lacking <= 0:
            return None
        message = (
            f"{waiting} sequences wait here and the limit is {self._max_waiting}. Try again later."
        )
        failure = Failure(503, "overloaded", message, retryable=True)
        places = state.waiting.places(share.num_open + count, num_lacking)
        if len(places) < num_lacking:
            return failure
        for sequence in places:
            state.end(sequence, "refused", failure)
        return None


def refusal(request: Generate, spec: RunnerSpec, capacity: int) -> Failure | None:
    """Say why this request can never run here: what only compute knows, and one check of others."""
    if not (spec.pooling if request.pooling else spec.generates):
        message = NO_EMBEDDINGS if request.pooling else EMBEDDINGS_ONLY
        return Failure(400, "unsupported_model", message, "model")
    wrong = _out_of_bounds(request, spec)
    if wrong:
        return Failure(500, "internal_error", f"A request came to compute with a wrong {wrong}.")
    return _grammar_refusal(request, spec) or _length_refusal(request, spec, capacity)


def _out_of_bounds(request: Generate, spec: RunnerSpec) -> str:
    """Return the name of a field beyond what the runner has room for or could read, or ""."""
    sampling = request.sampling
    own_stop_ids = () if sampling.ignore_eos else spec.eos_token_ids
    in_bounds = {
        "prompt": len(request.prompt_ids) > 0,
        "max_tokens": sampling.max_tokens >= 1 or request.pooling,
        "n": 1 <= request.num_choices <= (1 if request.pooling else MAX_CHOICES),
        "prompt_logprobs": sampling.num_prompt_logprobs <= MAX_PROMPT_LOGPROBS,
        "stop_token_ids": len({*sampling.stop_token_ids, *own_stop_ids}) <= MAX_STOP_IDS,
        "logit_bias": len({token for token, _ in sampling.logit_bias}) <= MAX_BIAS,
    }
    for field, ids in _token_ids(request):
        if isinstance(ids, tuple):
            is_in_bounds = not ids or (min(ids) >= 0 and max(ids) < spec.vocab_size)
        else:
            # As unsigned numbers negative ids are huge: one pass over a long prompt finds both.
            is_in_bounds = not ids or int(np.frombuffer(ids, np.uint32).max()) < spec.vocab_size
        in_bounds[field] = in_bounds.get(field, True) and is_in_bounds
    return next((field for field, is_in_bounds in in_bounds.items() if not is_in_bounds), "")


def _token_ids(request: Generate) -> Iterator[tuple[str, bytes | array[int] | tuple[int, ...]]]:
    sampling = request.sampling
    yield "prompt", request.prompt_ids
    yield "output_ids", request.output_ids
    yield "prediction", request.prediction_ids
    yield "stop_token_ids", sampling.stop_token_ids
    yield "logit_bias", tuple(token for token, _ in sampling.logit_bias)
    if sampling.grammar_spec is not None:
        yield "allowed_token_ids", sampling.grammar_spec.allowed_token_ids
        yield "bad_words", tuple(chain.from_iterable(sampling.grammar_spec.banned_sequences))


def _grammar_refusal(request: Generate, spec: RunnerSpec) -> Failure | None:
    grammar_spec = request.sampling.grammar_spec
    if grammar_spec is None:
        return None
    num_banned = sum(map(len, grammar_spec.banned_sequences))
    if num_banned > MAX_BANNED_TOKENS:
        message = f"bad_words come to {num_banned} tokens; at most {MAX_BANNED_TOKENS} are taken."
        return Failure(400, "bad_words_too_long", message, "bad_words")
    if grammar_spec.grammar and not spec.eos_token_ids and not request.sampling.stop_token_ids:
        field = grammar_spec.field
        message = (
            f"This model names no token that ends a text, so that {field} cannot be satisfied. "
            "Give stop_token_ids."
        )
        return Failure(400, "grammar_unsupported", message, field)
    return None


def _length_refusal(request: Generate, spec: RunnerSpec, capacity: int) -> Failure | None:
    """Refuse what the model's context or this replica's KV memory cannot hold."""
    num_prompt, max_tokens = len(request.prompt_ids) // 4, request.sampling.max_tokens
    if request.pooling:
        longest = min(spec.max_model_len, capacity)
        message = (
            f"The input has {num_prompt} tokens, and this replica takes {longest}. Shorten it."
        )
        too_long = Failure(400, "context_length_exceeded", message, "input")
        return too_long if num_prompt > longest else None
    total = num_prompt + max_tokens
    if total > spec.max_model_len:
        longest, room = spec.max_model_len - 1, f"this model takes {spec.max_model_len}"
    elif total - 1 > capacity:  # the last token is sampled but never computed, so needs no place
        longest = capacity
        room = f"this replica has memory for {capacity} (see max_batched_token_mem)"
    else:
        return None
    message = (
        f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together {total}, "
        f"but {room}. Shorten one of them."
    )
    if num_prompt <= longest:  # the prompt is at fault where even one token more would not fit
        return Failure(400, "context_length_exceeded", message, "max_tokens")
    return Failure(400, "context_length_exceeded", message, "prompt", False, num_prompt, longest)
