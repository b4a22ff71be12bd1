"""Our rendering is that of transformers, to the character, and so are its refusals."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Conversation
from tests.unit.tokenizer.conversations import CONVERSATIONS, TOOLS, VARIABLES, Messages
from tests.unit.tokenizer.vocabularies import NAMED_TOKENS, byte_level

NOW_S = 1_712_345_678.0
OURS = {file.stem: file.read_text("utf-8") for file in Path(__file__).parent.glob("templates/*")}


class Frozen(datetime):
    """transformers asks the clock; the comparison needs one that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.fromtimestamp(NOW_S, tz)


@pytest.fixture(autouse=True)
def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)


@cache
def reference() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMED_TOKENS)


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, NAMED_TOKENS)


def published() -> Iterator[tuple[str, str]]:
    """The templates of real models that the installed transformers has in its source."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    for model in ("llama4", "qwen2_audio", "smolvlm"):
        file = Path(spec.origin).parent / "models" / model / f"processing_{model}.py"
        if not file.is_file():
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if "{%" in node.value and "messages" in node.value:
                    yield f"{model}:{node.lineno}", node.value


TEMPLATES = {**OURS, **dict(published())}


def theirs(source: str, messages: Messages, tools: Any, **options: Any) -> str | None:
    """What transformers renders, None where it raises."""
    try:
        text: str = reference().apply_chat_template(
            messages, tools=tools, chat_template=source, tokenize=False, **options
        )
    except Exception:
        return None
    return text


def ours(
    source: str, messages: Messages, tools: Any, variables: dict[str, Any], **options: Any
) -> str | None:
    """What we render, None where we raise."""
    try:
        conversation = Conversation(messages, tools, variables, **options)
        return compiled(source).render(conversation, NOW_S)
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers_over_all_conversations(name: str) -> None:
    """Any three of conversation, tools, variables and mode meet in all ways."""
    source = TEMPLATES[name]
    modes = (
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"add_generation_prompt": True, "continue_final_message": True},
    )
    num_rendered = 0
    axes = [*CONVERSATIONS.items()], (None, [], TOOLS), [*VARIABLES.items()], modes
    for combination in itertools.product(*map(enumerate, axes)):
        places, values = zip(*combination, strict=True)
        if sum(places) % 3:  # every axis has three values or more, so any three of them are crossed
            continue
        (title, messages), tools, (which, variables), mode = values
        expected = theirs(source, messages, tools, **mode, **variables)
        got = ours(source, messages, tools, variables, **mode)
        assert got == expected, (name, title, bool(tools), which, mode)
        num_rendered += expected is not None
    assert num_rendered > 100, "the template renders next to nothing: the comparison is empty"


SNIPPETS = {
    "html stays as it is": "{{ '<b>&\"' | tojson }}",
    "tojson takes positional arguments": "{{ {'b': 'é', 'a': 1} | tojson(true, 2) }}",
    "tojson sorts and separates": (
        "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':'), sort_keys=true) }}"
    ),
    "autoescape is off": "{{ '<' }}",
    "blocks are trimmed": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "a last newline is kept away": "a\n",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation block has a scope of its own": (
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}"
    ),
    "generation block sees the loop": (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}"
        "{% endgeneration %}{% endfor %}"
    ),
    "undefined is silent": "[{{ nothing }}{{ messages[0].nothing }}]",
    "undefined of undefined raises": "{{ nothing.at.all }}",
    "raise_exception": "{{ raise_exception('no') }}",
    "lists cannot be changed": "{{ messages.append(1) }}",
    "dicts cannot be changed": "{{ messages[0].update({'a': 1}) }}",
    "namespace refuses underscores": "{% set n = namespace(_a=1) %}",
    "namespace refuses underscores later": "{% set n = namespace() %}{% set n.__a = 1 %}",
    "namespace of a dict": "{% set n = namespace({'a': 1}, b=2) %}{{ n.a + n.b }}",
    "namespace called self": "{% set n = namespace(self=3) %}{{ n.self }}",
    "classes are out of reach": "{{ ''.__class__.__mro__ }}",
    "globals are out of reach": "{{ raise_exception.__globals__ }}",
    "strftime_now leads nowhere": "{{ strftime_now.__self__ }}",
    "format reaches no attribute": "{{ '{0.__class__}'.format(messages) }}",
    "dict has fromkeys": "{{ dict.fromkeys(['a'], 1) }}{{ dict(a=2) }}",
    "dict is no type": "{{ dict.mro() }}",
    "range is bounded": "{{ range(1000000) | length }}",
    "no imports": "{% include 'other' %}",
    "date": "{{ strftime_now('%Y-%m-%d %H:%M') }}",
    "documents are defined": "{{ documents is defined }}{{ documents is none }}",
    "tools are defined": "{{ tools is defined }}{{ tools is none }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}",
    "lipsum is there": "{{ lipsum is defined }}{{ cycler('a', 'b').next() }}",
    "does not compile": "{% if %}",
    "unknown tag": "{% what %}",
    "unknown filter": "{{ 'a' | what }}",
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_environment_behaves_like_transformers(name: str) -> None:
    messages = CONVERSATIONS["many turns"]
    expected = theirs(SNIPPETS[name], messages, None)
    assert ours(SNIPPETS[name], messages, None, {}) == expected


@given(
    content=st.text(alphabet=" \n\tab.CONTINUE_FINAL", max_size=12),
    name=st.sampled_from(["chatml", "gemma", "llama31_tools", "vicuna", "smol_generation"]),
)
def test_a_continued_message_ends_as_in_transformers(content: str, name: str) -> None:
    messages: Messages = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": content},
    ]
    expected = theirs(OURS[name], messages, None, continue_final_message=True)
    got = ours(OURS[name], messages, None, {}, continue_final_message=True)
    assert got == expected


def test_ids_of_a_chat_equal_transformers() -> None:
    source = OURS["qwen25_tools"]
    messages = CONVERSATIONS["two calls and two results"]
    expected = reference().apply_chat_template(
        messages, tools=TOOLS, chat_template=source, add_generation_prompt=True, return_dict=False
    )
    text = ours(source, messages, TOOLS, {}, add_generation_prompt=True)
    assert byte_level().encode(text, add_special_tokens=False).ids == expected


def test_a_retry_renders_the_date_of_its_admission() -> None:
    template = compiled("{{ strftime_now('%Y') }}")
    conversation = Conversation([{"role": "user", "content": "x"}])
    mid_2001_s, mid_2024_s = 993_000_000.0, 1_719_000_000.0
    assert [template.render(conversation, at_s) for at_s in (mid_2024_s, mid_2001_s)] == [
        "2024",
        "2001",
    ]


def test_rendering_leaves_the_messages_as_they_are() -> None:
    messages: Messages = [
        {"role": "user", "content": None, "name": None},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning": "r"},
    ]
    before = repr(messages)
    ours(OURS["gemma3_parts"], messages, None, {}, continue_final_message=True)
    assert repr(messages) == before


def test_what_a_template_says_reaches_the_caller() -> None:
    with pytest.raises(TemplateError, match="knows no system role"):
        compiled(OURS["gemma"]).render(Conversation(CONVERSATIONS["system first"]), NOW_S)


def test_a_template_that_does_not_compile_is_named_at_once() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})
