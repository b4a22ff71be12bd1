"""Structured requests through the compute actor, with a real mask worker."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.sampling import SamplingParams
from tests.flow.compute_ring import Ring
from tests.flow.structured_ring import (
    EOS,
    schema_grammar,
    structured,
    structured_ring,
    text_of,
    tokenizer,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
AMBIGUOUS = 'start: s "b"\ns: s s | s s s | "a"\n'  # a mask takes longer with every token


def free(seed: int) -> dict[str, SamplingParams]:
    """The fields of `Ring.ask` for a request without guidance."""
    return {"sampling": SamplingParams(max_tokens=40, seed=seed)}


def mask_worker_pid(ring: Ring) -> int:
    """The process that makes the masks."""
    process: Any = ring.actor._grammars._worker._process
    return int(process.pid)


def failure_of(ring: Ring, attempt: AttemptId) -> Failure:
    """What an attempt was ended by, once."""
    (ended,) = ring.ended(attempt)
    assert ended.failure is not None
    return ended.failure


def check_person(ring: Ring, attempt: AttemptId) -> None:
    """It ended by stop and is what was asked for, or it says that it ended too early."""
    (reason,) = ring.endings(attempt)
    ids = ring.tokens(attempt)
    if reason == "stop":
        assert ids[-1] == EOS
        jsonschema.validate(json.loads(text_of(ids)), PERSON)
    else:
        assert reason == "length"


async def all_ended(ring: Ring, attempts: list[AttemptId]) -> None:
    """Wait for every terminal; nothing may be left."""
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    assert ring.actor.idle
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total


@pytest.mark.parametrize(
    ("schedule", "in_flight_steps"),
    [("decode_first", 1), ("prefill_first", 2), ("static_batch", 0), ("static_batch", 1)],
)
async def test_what_ends_by_stop_is_json_of_the_schema(
    tmp_path: Path, schedule: str, in_flight_steps: int
) -> None:
    settings = {"schedule": schedule, "in_flight_steps": in_flight_steps}
    async with structured_ring(tmp_path, static_batch_window_s=0.001, **settings) as ring:
        grammar = schema_grammar(PERSON)
        first = 1 + 6 * (in_flight_steps + 3 * len(schedule))  # texts of its own in each case
        seeds = range(first, first + 6)
        attempts = [ring.ask(n, **structured(grammar, seed=n)) for n in seeds]
        await all_ended(ring, attempts)
        for attempt in attempts:
            check_person(ring, attempt)
        assert sum(ring.endings(attempt) == ["stop"] for attempt in attempts) >= 4


async def test_what_is_cut_short_says_so(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        attempt = ring.ask(1, **structured(schema_grammar(PERSON), max_tokens=7))
        await all_ended(ring, [attempt])
        assert ring.endings(attempt) == ["length"]
        assert len(ring.tokens(attempt)) == 7


@pytest.mark.parametrize("held_back", [{"ignore_eos": True}, {"min_tokens": 150}])
async def test_a_grammar_that_ends_wins_over_what_holds_the_end_back(
    tmp_path: Path, held_back: dict[str, Any]
) -> None:
    async with structured_ring(tmp_path) as ring:
        given = structured(schema_grammar(PERSON))["sampling"]
        attempts = [ring.ask(n, sampling=replace(given, seed=n, **held_back)) for n in range(1, 9)]
        await all_ended(ring, attempts)
        for attempt in attempts:
            check_person(ring, attempt)
        assert sum(ring.endings(attempt) == ["stop"] for attempt in attempts) >= 6


async def test_a_stop_token_cuts_a_structure(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        (colon,) = tokenizer().encode(":").ids
        given = structured('start: "a:" /[b-d]{3}/\n')["sampling"]
        cut = ring.ask(1, sampling=replace(given, stop_token_ids=(colon,)))
        await all_ended(ring, [cut])
        assert ring.endings(cut) == ["stop"]
        assert text_of(ring.tokens(cut)) == "a:"


async def test_unstructured_rows_of_a_mixed_batch_get_the_tokens_that_they_get_alone(
    tmp_path: Path,
) -> None:
    async with structured_ring(tmp_path) as ring:
        alone = [ring.ask(100 + n, **free(n)) for n in range(6)]
        await all_ended(ring, alone)
        grammar = schema_grammar(PERSON)
        mixed = []
        for n in range(6):
            mixed.append(ring.ask(200 + n, **free(n)))
            mixed.append(ring.ask(300 + n, **structured(grammar, seed=n)))
        await all_ended(ring, mixed)
        for first, second in zip(alone, mixed[::2], strict=True):
            assert ring.tokens(first) == ring.tokens(second)


async def test_several_choices_are_structured_each(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        first = ring.ask(1, num_choices=4, **structured(schema_grammar(PERSON)))
        attempts = [AttemptId(first.router, 1 + choice) for choice in range(4)]
        await all_ended(ring, attempts)
        for attempt in attempts:
            check_person(ring, attempt)


async def test_a_retry_goes_on_inside_of_its_grammar(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        grammar = schema_grammar(PERSON)
        whole = ring.ask(1, **structured(grammar))
        await all_ended(ring, [whole])
        ids = ring.tokens(whole)
        rest = ring.ask(2, output_ids=int32s(ids[:9]), **structured(grammar))
        await ring.until(lambda: bool(ring.endings(rest)))
        rows = [row for row in ring.rows if row.attempt == rest]
        assert rows[0].first_index == 9
        assert [token for row in rows for token in row.token_ids] == ids[9:]


async def test_outputs_of_a_retry_that_the_grammar_forbids_end_it(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        attempt = ring.ask(1, output_ids=int32s([40, 41]), **structured(schema_grammar(PERSON)))
        await ring.until(lambda: bool(ring.endings(attempt)))
        assert failure_of(ring, attempt).code == "grammar_failed"
        assert failure_of(ring, attempt).status == 500


async def test_only_allowed_tokens_come(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        attempts = [
            ring.ask(n, **structured(allowed_token_ids=(7, 9, 300), seed=n, max_tokens=30))
            for n in range(1, 5)
        ]
        await all_ended(ring, attempts)
        for attempt in attempts:
            assert set(ring.tokens(attempt)) <= {7, 9, 300}
            assert ring.endings(attempt) == ["length"]


async def test_banned_sequences_never_come(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        rules = {"allowed_token_ids": (7, 8, 9), "banned_sequences": ((7, 8), (9, 9), (8, 9, 7))}
        attempts = [ring.ask(n, **structured(seed=n, max_tokens=60, **rules)) for n in range(1, 5)]
        await all_ended(ring, attempts)
        for attempt in attempts:
            ids = ring.tokens(attempt)
            for banned in rules["banned_sequences"]:
                found = [tuple(ids[i : i + len(banned)]) for i in range(len(ids))]
                assert banned not in found


async def test_special_tokens_stand_in_a_grammar_by_name(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        attempt = ring.ask(1, **structured('start: "{" <tool_call> "}"\n'))
        await all_ended(ring, [attempt])
        special = tokenizer().token_to_id("<tool_call>")
        brackets = [tokenizer().token_to_id(text) for text in "{}"]
        assert ring.tokens(attempt) == [brackets[0], special, brackets[1], EOS]


BAD_GRAMMARS = {
    "start: foo\n": 'unknown name: "foo"',
    "start: /(?=a)b/\n": "look-around",
    '{"grammars": [{"json_schema": {"type": "foo"}}]}': "foo",
    '{"grammars": [{"json_schema": {"$ref": "#/$defs/zzz"}}]}': "zzz",
    '{"grammars": [{"json_schema": {"$ref": "http://169.254.169.254/x"}}]}': "http",
    schema_grammar(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ): "",
}


async def test_a_grammar_that_does_not_compile_is_refused_and_the_field_named(
    tmp_path: Path,
) -> None:
    async with structured_ring(tmp_path) as ring:
        for counter, (grammar, reason) in enumerate(BAD_GRAMMARS.items(), 1):
            attempt = ring.ask(counter, **structured(grammar, field="structured_outputs"))
            await all_ended(ring, [attempt])
            failure = failure_of(ring, attempt)
            assert ring.endings(attempt) == ["refused"]
            assert (failure.status, failure.code) == (400, "invalid_grammar")
            assert failure.field == "structured_outputs"
            assert reason in failure.message
            assert "<state>" not in failure.message and len(failure.message) < 600


async def test_a_grammar_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with structured_ring(tmp_path, max_grammar_bytes=1000) as ring:
        attempt = ring.ask(1, **structured("start: " + "x" * 1000))
        await all_ended(ring, [attempt])
        assert failure_of(ring, attempt).code == "grammar_too_large"


async def test_a_model_without_a_tokenizer_refuses_grammars_and_takes_lists(
    tmp_path: Path,
) -> None:
    async with structured_ring(tmp_path) as ring:
        (tmp_path / "tokenizer.json").unlink()
        grammar = ring.ask(1, **structured("start: /a/\n"))
        allowed = ring.ask(2, **structured(allowed_token_ids=(5,), max_tokens=3))
        await all_ended(ring, [grammar, allowed])
        assert "tokenizer.json" in failure_of(ring, grammar).message
        assert set(ring.tokens(allowed)) <= {5, EOS}


async def test_a_grammar_that_kills_its_compiler_is_refused_and_others_go_on(
    tmp_path: Path,
) -> None:
    deep: dict[str, Any] = {
        f"a{i}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}},
            "required": ["x"],
        }
        for i in range(3000)
    }
    deep["a3000"] = {"type": "string"}
    bomb = schema_grammar({"$defs": deep, "$ref": "#/$defs/a0"})
    async with structured_ring(tmp_path, max_grammar_bytes=1 << 20) as ring:
        running = ring.ask(1, **structured(allowed_token_ids=tuple(range(10, 90)), max_tokens=150))
        await ring.until(lambda: len(ring.tokens(running)) > 3)
        bad = ring.ask(2, **structured(bomb, field="tools"))
        good = ring.ask(3, **structured(schema_grammar(PERSON)))
        await all_ended(ring, [running, bad, good])
        assert failure_of(ring, bad).code == "invalid_grammar"
        assert failure_of(ring, bad).field == "tools"
        check_person(ring, good)
        assert set(ring.tokens(running)) <= {*range(10, 90), EOS}


async def test_a_grammar_that_compiles_too_long_is_refused_and_others_go_on(
    tmp_path: Path,
) -> None:
    fields = {
        f"p{i}": {"type": "object", "properties": {f"q{j}": {"type": "string"} for j in range(20)}}
        for i in range(700)
    }
    slow = schema_grammar({"type": "object", "properties": fields})
    async with structured_ring(tmp_path, grammar_timeout_s=0.05, max_grammar_bytes=1 << 20) as ring:
        good = ring.ask(1, **structured(schema_grammar(PERSON)))
        await ring.until(lambda: len(ring.tokens(good)) > 3)
        bad = ring.ask(2, **structured(slow))
        later = ring.ask(3, **structured(schema_grammar(PERSON)))
        await ring.until(lambda: bool(ring.endings(bad)))
        await all_ended(ring, [good, bad, later])
        assert failure_of(ring, bad).code == "grammar_timeout"
        check_person(ring, good)
        check_person(ring, later)


async def test_an_abort_while_the_grammar_compiles_ends_it_once(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        first = ring.ask(1, num_choices=3, **structured(schema_grammar(PERSON)))
        attempts = [AttemptId(first.router, 1 + choice) for choice in range(3)]
        ring.abort(attempts[1])
        await all_ended(ring, attempts)
        assert ring.endings(attempts[1]) == ["aborted"]
        assert ring.tokens(attempts[1]) == []
        check_person(ring, attempts[0])
        check_person(ring, attempts[2])


async def test_a_mask_worker_that_is_killed_in_mid_stream_costs_no_token(tmp_path: Path) -> None:
    async with structured_ring(tmp_path, step_s=0.001) as ring:
        grammar = schema_grammar(PERSON)
        alone = [ring.ask(n, **structured(grammar, seed=n)) for n in range(1, 7)]
        await all_ended(ring, alone)
        again = [ring.ask(10 + n, **structured(grammar, seed=n)) for n in range(1, 7)]
        for tokens in (3, 20, 30):
            await ring.until(lambda n=tokens: max(len(ring.tokens(a)) for a in again) >= n)
            pid = mask_worker_pid(ring)
            os.kill(pid, signal.SIGKILL)
            await ring.until(
                lambda old=pid: (
                    ring.actor._grammars._worker.is_ready and mask_worker_pid(ring) != old
                )
            )
        await all_ended(ring, again)
        for first, second in zip(alone, again, strict=True):
            assert ring.tokens(first) == ring.tokens(second)


async def test_nobody_waits_for_a_slow_grammar(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        slow = ring.ask(1, **structured(AMBIGUOUS, max_tokens=400))
        await ring.until(lambda: len(ring.tokens(slow)) > 30)
        others = [ring.ask(2, **free(2)), ring.ask(3, **structured(schema_grammar(PERSON)))]
        await ring.until(lambda: all(ring.endings(attempt) for attempt in others))
        check_person(ring, others[1])
        ring.abort(slow)
        await all_ended(ring, [slow, *others])


async def test_preemption_keeps_the_place_in_the_grammar(tmp_path: Path) -> None:
    async with structured_ring(tmp_path, num_pages=12) as ring:
        grammar = schema_grammar(PERSON)
        attempts = [
            ring.ask(n, prompt=range(10, 20), **structured(grammar, 120, seed=n))
            for n in range(1, 9)
        ]
        await all_ended(ring, attempts)
        assert ring.device.scheduler.stats().preemptions_total > 0
        for attempt in attempts:
            check_person(ring, attempt)


async def test_a_drain_waits_for_what_is_held_and_its_end_moves_it(tmp_path: Path) -> None:
    async with structured_ring(tmp_path) as ring:
        held = ring.ask(1, **structured(schema_grammar(PERSON)))
        await ring.until(lambda: not ring.actor.idle)
        ring.actor.drain()
        assert not ring.actor.drained
        await ring.actor.stop()
        await ring.until(lambda: bool(ring.endings(held)))
        assert ring.endings(held) == ["moved"]
