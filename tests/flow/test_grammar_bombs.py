"""Grammars made to hurt: each comes to one end, and who is beside them notices nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from tests.flow.structured_ring import schema_grammar, structured, structured_ring
from tests.patience import PATIENCE_S


def regex(text: str) -> str:
    return str(LLMatcher.grammar_from_regex(text))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


NODE = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["children"],
}
BOMBS = {
    "nested plus": regex("(a+)+b"),
    "nested counts": regex("((a{1,1000}){1,1000}){1,1000}"),
    "long count": regex("[a-z]{1,100000}x"),
    "many stars": regex("(.*a){30}"),
    "look back": regex(".*a.{20}"),
    "unicode classes": regex(r"((\p{L}|\p{N}|\p{Han}){1,500}\p{Greek}{3,100}){1,50}"),
    "large enum": schema_grammar({"enum": [f"value {7919 * i}" for i in range(10_000)]}),
    "deep schema": schema_grammar(nested(100)),
    "recursion": schema_grammar({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}),
    "cycle of references": schema_grammar(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "file": schema_grammar({"$ref": "file:///etc/passwd"}),
    "counts of items": schema_grammar(
        {"type": "array", "minItems": 100_000, "items": {"type": "array", "minItems": 1_000}}
    ),
    "wide object": schema_grammar(
        {"type": "object", "properties": {f"p{i}": nested(2) for i in range(1_500)}}
    ),
    "alternatives": schema_grammar(
        {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for i in range(10)]}
                for j in range(8)
            ]
        }
    ),
    "doubling": "start: a0\n"
    + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40))
    + 'a40: "x"',
    "ambiguity": 'start: s "b"\ns: s s | s s s | "a"\n',
    "empty": "{}",
    "not JSON": "{" * 1000,
    "deep JSON": json.dumps({"grammars": []})[:-2] + "[" * 5_000,
    "zeros": "\0" * 100,
}


async def test_a_bomb_has_one_end_and_hurts_nobody_else(tmp_path: Path) -> None:
    # A busy machine may take longer than the usual limits, which would restart the mask worker.
    patience = {"grammar_timeout_s": PATIENCE_S, "grammar_step_timeout_s": PATIENCE_S}
    async with structured_ring(
        tmp_path, step_s=0.001, max_grammar_bytes=1 << 20, **patience
    ) as ring:
        for number, (name, bomb) in enumerate(BOMBS.items()):
            beside = ring.ask(2 * number, **structured('start: /[a-z]{60}/ "."\n'))
            await ring.until(lambda each=beside: len(ring.tokens(each)) > 1)
            attempt = ring.ask(2 * number + 1, **structured(bomb, max_tokens=25))
            both = (attempt, beside)
            await ring.until(lambda each=both: all(map(ring.endings, each)))
            assert ring.endings(beside) == ["stop"], name
            (ended,) = ring.ended(attempt)
            if ended.failure is not None:
                assert ended.failure.code in ("invalid_grammar", "grammar_failed"), name
                assert len(ended.failure.message) < 600, name
            assert ring.actor._grammars._worker.num_restarts == 0, name


async def test_a_grammar_that_takes_all_memory_is_refused(tmp_path: Path) -> None:
    fields = {f"p{i}": nested(8) for i in range(4_000)}
    greedy = schema_grammar({"type": "object", "properties": fields})
    settings = {"grammar_memory_mb": 96, "max_grammar_bytes": 4 << 20}
    async with structured_ring(tmp_path, **settings) as ring:
        beside = ring.ask(1, **structured('start: /[a-z]{60}/ "."\n'))
        await ring.until(lambda: len(ring.tokens(beside)) > 1)
        bomb = ring.ask(2, **structured(greedy))
        await ring.until(lambda: bool(ring.endings(bomb) and ring.endings(beside)))
        assert ring.endings(beside) == ["stop"]
        assert ring.endings(bomb) == ["refused"]
        failure = ring.ended(bomb)[0].failure
        assert failure is not None and failure.code == "invalid_grammar"
