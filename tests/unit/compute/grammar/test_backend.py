"""One sequence's masks under a real grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.messages.sampling import GrammarSpec
from services.compute.grammar.backend import (
    GrammarBackend,
    GrammarError,
    MaskRow,
    SequenceMatcher,
    TokenRefused,
    bits_of,
)
from services.compute.grammar.protocol import GrammarSettings
from services.compute.step import mask_words
from tests.flow.structured_ring import EOS, VOCAB_SIZE, save_tokenizer, tokenizer
from tests.ranked_folder import HELLO, write_ranked
from tests.unit.compute.grammar.structured_plans import make_start, tokens_in


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("model"))
    settings = GrammarSettings(
        folder=str(folder),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        num_slots=1,
        cache_entries=3,
        cache_bytes=100,
    )
    return GrammarBackend(settings)


def make_matcher(
    backend: GrammarBackend, grammar: str, *output_ids: int, **changes: Any
) -> SequenceMatcher:
    place = make_start(GrammarSpec(grammar), output_ids=output_ids, **changes)
    matcher = SequenceMatcher(
        place, backend.compile(grammar), bits_of(range(VOCAB_SIZE), VOCAB_SIZE)
    )
    for _ in matcher.replay():
        pass
    return matcher


def allowed(matcher: SequenceMatcher) -> set[int]:
    mask_W = np.zeros(mask_words(VOCAB_SIZE), dtype=np.int32)
    matcher.fill(MaskRow(mask_W))
    return tokens_in(mask_W)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text).ids)


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(backend: GrammarBackend) -> None:
    matcher = make_matcher(backend, 'start: "a" ("b" "c")?\n')
    a, b, c = ids_of("abc")
    assert allowed(matcher) == {a}
    assert matcher.consume(0, a)
    assert allowed(matcher) == {b, EOS}
    assert matcher.consume(1, b)
    assert allowed(matcher) == {c}
    assert matcher.consume(2, c)
    assert allowed(matcher) == {EOS}
    assert matcher.consume(3, EOS) is False


def test_a_grammar_is_applied_with_the_tokens_of_a_tiktoken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = GrammarSettings(
        folder=str(write_ranked(tmp_path / "model")),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(len(HELLO),),
        num_slots=1,
    )
    found = allowed(make_matcher(GrammarBackend(settings), "start: /[a-z]+/"))
    assert {HELLO[token] for token in found} == {text for text in HELLO if text.islower()}


def test_a_stop_token_may_cut_the_text_where_the_grammar_has_it(backend: GrammarBackend) -> None:
    a, b, c = ids_of("abc")
    matcher = make_matcher(backend, 'start: "a" "b" "c"?\n', stop_ids=(b, 5))
    assert allowed(matcher) == {a}, "a stop token is no text of its own"
    assert matcher.consume(0, a)
    assert allowed(matcher) == {b}
    assert matcher.consume(1, b) is False
    whole = make_matcher(backend, 'start: "a" "b" "c"?\n', a, b, stop_ids=(5,))
    assert allowed(whole) == {c, 5, EOS}, "where it accepts it may end by any of them"


@pytest.mark.parametrize("held_back", [{"min_tokens": 9}, {"ignore_eos": True}])
def test_the_end_is_held_back_until_there_is_nothing_else(
    backend: GrammarBackend, held_back: dict[str, Any]
) -> None:
    a, b = ids_of("ab")
    matcher = make_matcher(backend, 'start: "a" "b"?\n', **held_back)
    assert matcher.consume(0, a)
    assert allowed(matcher) == {b}
    assert matcher.consume(1, b)
    assert allowed(matcher) == {EOS}
    assert matcher.consume(2, EOS) is False


def test_min_tokens_hold_a_stop_token_back_where_the_text_can_go_on(
    backend: GrammarBackend,
) -> None:
    a, b, c = ids_of("abc")
    matcher = make_matcher(backend, 'start: "a" ("b" | "c")\n', a, stop_ids=(b,), min_tokens=3)
    assert allowed(matcher) == {c}


def test_outputs_produced_before_lead_to_the_same_place(backend: GrammarBackend) -> None:
    grammar = 'start: /[a-z]{30}/ "x"\n'
    outputs = ids_of("abcdefghijklmnopqrstuvwxyzabcd")
    matcher = make_matcher(backend, grammar)
    for index, token in enumerate(outputs):
        assert matcher.consume(index, token)
    again = make_matcher(backend, grammar, *outputs)
    assert allowed(matcher) == allowed(again) == set(ids_of("x"))
    assert matcher.index == again.index == 30
    assert matcher.start == again.start


def test_outputs_that_the_grammar_forbids_are_an_error(backend: GrammarBackend) -> None:
    with pytest.raises(TokenRefused, match="grammar"):
        make_matcher(backend, 'start: "a"\n', *ids_of("b"))


def test_a_token_out_of_turn_is_an_error(backend: GrammarBackend) -> None:
    matcher = make_matcher(backend, 'start: "ab"\n')
    with pytest.raises(TokenRefused, match="output 1 came where output 0 was due"):
        matcher.consume(1, ids_of("a")[0])


def test_rules_that_leave_no_token_are_an_error(backend: GrammarBackend) -> None:
    grammar = 'start: "a"\n'
    place = make_start(GrammarSpec(grammar, allowed_token_ids=ids_of("b")))
    everything = bits_of(range(VOCAB_SIZE), VOCAB_SIZE)
    matcher = SequenceMatcher(place, backend.compile(grammar), everything)
    with pytest.raises(GrammarError, match="no token"):
        allowed(matcher)


def test_nothing_is_made_after_the_last_token(backend: GrammarBackend) -> None:
    place = make_start(GrammarSpec(allowed_token_ids=(5,)), max_tokens=2)
    matcher = SequenceMatcher(place, None, bits_of(range(VOCAB_SIZE), VOCAB_SIZE))
    assert matcher.consume(0, 5) is True
    assert matcher.consume(1, 5) is False


def test_copies_of_one_grammar_go_their_own_ways(backend: GrammarBackend) -> None:
    grammar = 'start: "ab" | "cd"\n'
    first, second = make_matcher(backend, grammar), make_matcher(backend, grammar)
    a, b, c, d = ids_of("abcd")
    first.consume(0, a)
    second.consume(0, c)
    assert (allowed(first), allowed(second)) == ({b}, {d})


def test_a_string_may_hold_any_token_that_keeps_it_one(backend: GrammarBackend) -> None:
    schema = json.dumps({"grammars": [{"json_schema": {"type": "string"}}]})
    matcher = make_matcher(backend, schema, *ids_of('"'))
    tokens = allowed(matcher)
    assert set(ids_of("true")) <= tokens and set(ids_of('"')) <= tokens
    assert EOS not in tokens and not tokens & set(ids_of("\n"))


def test_the_grammars_used_last_are_kept_within_both_bounds(backend: GrammarBackend) -> None:
    grammars = [f'start: "{letter}"\n' for letter in "abcde"]
    for grammar in grammars:
        backend.compile(grammar)
    assert [backend.kept(grammar) is not None for grammar in grammars] == [0, 0, 1, 1, 1]
    long = 'start: "' + "a" * 200 + '"\n'
    backend.compile(long)
    assert backend.kept(long) is not None
    assert all(backend.kept(grammar) is None for grammar in grammars)


@pytest.mark.parametrize("grammar", ["start: foo\n", "{", "start: /(?=a)b/\n", "\0"])
def test_a_bad_grammar_is_explained_without_inner_state(
    backend: GrammarBackend, grammar: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        backend.compile(grammar)
    assert 0 < len(str(caught.value)) < 450
    assert "<" not in str(caught.value).splitlines()[-1]


def test_a_grammar_that_no_text_satisfies_is_refused(backend: GrammarBackend) -> None:
    cyclic = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    schema = json.dumps({"grammars": [{"json_schema": {**cyclic, "$ref": "#/$defs/a"}}]})
    with pytest.raises(GrammarError):
        backend.compile(schema)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: x\nx: %json {"not": {}}\n', 'Unimplemented keys: ["not"]'),
        ("start: x\nx: /a\\b/\n", 'invalid regex "a\\\\b" (in regex): lookarounds'),
        ("start: (\n", "1(9): Expected token ')'"),
        ("start: start\n", "no text of this model's tokens can satisfy it"),
    ],
)
def test_an_error_has_no_lines_that_the_client_never_wrote(
    backend: GrammarBackend, grammar: str, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        backend.compile(grammar)
    assert str(caught.value).startswith(message)
    assert " | start" not in str(caught.value)
