"""Strict JSON: what must not get past the front door."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.errors import ApiError
from services.router.json_body import MAX_DEPTH, MAX_ELEMENTS, MAX_FIELDS, dump, num_elements, parse


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1, "a": 2}', 'duplicate key "a"'),
        (b'{"b": {"a": 1, "a": 1}}', 'duplicate key "a"'),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"a":' + b"[" * 60_000, "nested"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "nested"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1} {"b": 2}', "not valid JSON"),
    ],
)
def test_a_body_that_others_would_choke_on_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.failure.status == 400
    assert caught.value.failure.code == "invalid_json"
    assert said in caught.value.failure.message
    assert len(caught.value.failure.message) < 400


def test_a_request_has_a_bounded_number_of_fields() -> None:
    fields = {f"x{at}": at for at in range(MAX_FIELDS + 1)}
    with pytest.raises(ApiError, match="has 1,025 fields; 1,024 are accepted at most"):
        parse(json.dumps(fields).encode())
    assert parse(json.dumps({"metadata": fields}).encode()) == {"metadata": fields}
    del fields["x0"]
    assert parse(json.dumps(fields).encode()) == fields


def test_nesting_up_to_the_limit_is_taken() -> None:
    body = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse(body).keys() == {"a"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * MAX_ELEMENTS + b"[]]}",
        b'{"prompt": [' + b"{}," * MAX_ELEMENTS + b"{}]}",
        b"{" + b",".join(b'"x%d":1' % at for at in range(MAX_ELEMENTS + 1)) + b"}",
        b'{"logit_bias":{' + b",".join(b'"%d":1' % at for at in range(MAX_ELEMENTS)) + b"}}",
        b'{"a\\\\": "\\"", "b": [' + b"[]," * MAX_ELEMENTS + b"[]]}",
    ],
    ids=["arrays", "objects", "fields", "entries", "after escapes"],
)
def test_elements_are_counted_before_they_are_parsed(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", None)  # calling it would be a TypeError
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.failure.code == "invalid_json"
    assert f"{MAX_ELEMENTS:,} are accepted at most" in caught.value.failure.message


@pytest.mark.parametrize(
    "text", ["[{:" * MAX_ELEMENTS, '\\"[', '\\\\"{' * MAX_ELEMENTS, '":[' * 70_000]
)
def test_brackets_in_a_text_are_no_elements(text: str) -> None:
    body = {"prompt": text, "at": [[1], {"a": 2}]}
    assert parse(json.dumps(body).encode()) == body


@given(st.dictionaries(st.text(), st.lists(st.text() | st.lists(st.integers())), max_size=5))
def test_the_count_is_never_too_small(value: dict[str, list[object]]) -> None:
    lists = sum(1 + sum(isinstance(each, list) for each in values) for values in value.values())
    assert num_elements(json.dumps(value).encode()) >= 1 + len(value) + lists


def test_a_pair_of_surrogate_escapes_is_a_character() -> None:
    assert parse(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_what_is_valid_comes_through_unchanged(value: dict[str, object]) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(dump(value)) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    try:
        assert isinstance(parse(body), dict)
    except ApiError as error:
        assert error.failure.status == 400
