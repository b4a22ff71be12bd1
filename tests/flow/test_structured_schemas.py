"""Random small schemas: whatever ends by stop is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cases import num_cases
from tests.flow.structured_ring import EOS, schema_grammar, structured, structured_ring, text_of

scalars: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "boolean", "null")]),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.integers(-50, 50).map(lambda least: {"type": "integer", "minimum": least}),
    st.lists(st.sampled_from(["a", "bc", "true", 12, None]), min_size=1, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[ab]{2}-\\d{1,3}$"}),
    st.just({"type": "number", "minimum": 0, "maximum": 10}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects, some of whose properties may be left out."""
    properties = st.dictionaries(st.sampled_from(["x", "yes", "12", "é"]), inner, max_size=3)
    return st.tuples(properties, st.integers(0, 7)).map(
        lambda drawn: {
            "type": "object",
            "properties": drawn[0],
            "required": [name for i, name in enumerate(drawn[0]) if drawn[1] >> i & 1],
            "additionalProperties": False,
        }
    )


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Arrays of bounded length, and alternatives."""
    return st.one_of(
        st.tuples(inner, st.integers(0, 2)).map(
            lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": 3}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    )


schemas = st.recursive(scalars, lambda inner: objects(inner) | arrays(inner), max_leaves=6)


@settings(
    max_examples=num_cases(5, exploring=16),
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(drawn=st.lists(schemas, min_size=12, max_size=12))
async def test_whatever_ends_by_stop_obeys_its_schema(
    tmp_path_factory: Any, drawn: list[dict[str, Any]]
) -> None:
    folder: Path = tmp_path_factory.mktemp("model")
    async with structured_ring(folder, step_s=0.001) as ring:
        asked = {
            ring.ask(2 * n + 10, **structured(schema_grammar(schema), seed=n)): schema
            for n, schema in enumerate(drawn)
        }
        await ring.until(lambda: all(ring.endings(attempt) for attempt in asked))
        num_stopped = 0
        for attempt, schema in asked.items():
            (ended,) = ring.ended(attempt)
            ids = ring.tokens(attempt)
            if ended.reason == "stop":
                num_stopped += 1
                assert ids[-1] == EOS
                jsonschema.validate(json.loads(text_of(ids)), schema)
            else:
                assert ended.reason == "length" or (
                    ended.failure is not None and ended.failure.code == "invalid_grammar"
                ), ended
        assert num_stopped >= 6
