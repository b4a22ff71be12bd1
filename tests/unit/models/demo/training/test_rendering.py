"""The demo's chat template, and that training sees the very tokens that it gives."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.demo.training.conversation import Call, Conversation, Learn, Turn
from models.demo.training.corpus import conversations
from models.demo.training.rendering import END_THINK
from models.demo.training.tokenizer import encode

FOLDER = Path(__file__).resolve().parents[5] / "models" / "demo"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOOLS_TEXT = (
    '<tools>\n{"type": "function", "function": {"name": "get_weather", "parameters": {"type": '
    '"object", "properties": {"city": {"type": "string"}}}}}\n</tools>'
)
USER = {"role": "user", "content": "Hi"}


@cache
def transformers_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def bare_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(transformers_tokenizer().apply_chat_template(messages, tokenize=False, **options))


def call(name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_chat_template_renders_roles_and_opens_the_answer() -> None:
    messages = Conversation((Turn("Hi", "Hello!"),), system="Be brief.").messages()
    assert rendered(messages, add_generation_prompt=True) == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|assistant|>"
    )


def test_the_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(TemplateError, match="Unknown role: critic"):
        rendered([{"role": "critic", "content": "4"}])


def test_tools_are_listed_one_a_line_where_there_is_no_system_prompt() -> None:
    text = rendered([USER], tools=[TOOL], add_generation_prompt=True)
    assert text == f"<|bos|><|system|>{TOOLS_TEXT}<|end|><|user|>Hi<|end|><|assistant|>"
    two = rendered([USER], tools=[TOOL, TOOL])
    assert two.count('\n{"type": "function", ') == 2


def test_tools_are_listed_below_the_system_prompt() -> None:
    text = rendered([{"role": "system", "content": "Be brief."}, USER], tools=[TOOL])
    assert text == f"<|bos|><|system|>Be brief.\n\n{TOOLS_TEXT}<|end|><|user|>Hi<|end|>"


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
def test_a_call_is_tagged_and_its_result_too(content: Any, arguments: Any) -> None:
    calling = call("get_weather", arguments)
    messages = [
        {"role": "assistant", "content": content, "tool_calls": [calling]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]
    assert rendered(messages) == (
        '<|bos|><|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}'
        "\n</tool_call><|end|><|tool|><tool_response>\n18 degrees\n</tool_response><|end|>"
    )


def test_calls_stand_below_each_other_and_below_the_text_before_them() -> None:
    calls = [call("a", {}), call("b", {"x": 1})]
    text = rendered([{"role": "assistant", "content": "Wait.", "tool_calls": calls}])
    assert text == (
        '<|bos|><|assistant|>Wait.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"x": 1}}\n</tool_call><|end|>'
    )


def test_a_prompt_opens_a_thought_only_where_it_is_wished_for() -> None:
    thoughtful = rendered([USER], add_generation_prompt=True, enable_thinking=True)
    assert thoughtful == "<|bos|><|user|>Hi<|end|><|assistant|><think>\n"
    plain = rendered([USER], add_generation_prompt=True, enable_thinking=False)
    assert plain == rendered([USER], add_generation_prompt=True)
    assert plain == "<|bos|><|user|>Hi<|end|><|assistant|>"


def as_templated(conversation: Conversation) -> str:
    """Render as the server would: prompts by the template, and what the model then says."""
    tools = list(conversation.tools) or None
    if conversation.thought is None:
        return rendered(conversation.messages(), tools=tools)
    *before, last = conversation.messages()
    prompt = rendered(before, tools=tools, add_generation_prompt=True, enable_thinking=True)
    said = rendered([last]).removeprefix("<|bos|><|assistant|>")
    return f"{prompt}{conversation.thought}{END_THINK}{said}"


def test_training_sees_the_tokens_that_the_chat_template_gives() -> None:
    sample = list(islice(conversations(4), 400))
    assert any(chat.tools for chat in sample)
    assert any(chat.thought for chat in sample)
    for conversation, (ids, _) in zip(sample, encode(bare_tokenizer(), sample), strict=True):
        text = as_templated(conversation)
        assert transformers_tokenizer().encode(text, add_special_tokens=False) == ids


def learned_text(conversation: Conversation) -> str:
    [(ids, learned)] = encode(bare_tokenizer(), [conversation])
    last = [token for token, is_learned in zip(ids, learned, strict=True) if is_learned]
    return bare_tokenizer().decode(last, skip_special_tokens=False)


def test_only_what_the_assistant_says_is_learned() -> None:
    turns = (
        Turn("Hi", "Hello!"),
        Turn("Weather?", "Sunny.", (Call("get_weather", {"city": "Rome"}),), ("sunny",)),
    )
    assert learned_text(Conversation(turns, "Be brief.", (TOOL,))) == (
        'Hello!<|end|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call><|end|>Sunny.<|end|>"
    )


def test_a_thought_is_learned_but_not_the_tag_that_the_prompt_opens_it_with() -> None:
    conversation = Conversation((Turn("Hi", "Hello!"),), thought="A greeting.")
    assert learned_text(conversation) == "A greeting.\n</think>\n\nHello!<|end|>"


@pytest.mark.parametrize(
    ("learn", "learned"),
    [
        (Learn.VALUES, ' "Anna", 29, []}<|end|>'),
        (Learn.AFTER_FIRST_TOKEN, 'name": "Anna", "age": 29, "tags": []}<|end|>'),
    ],
)
def test_what_a_grammar_forces_is_not_learned(learn: Learn, learned: str) -> None:
    turn = Turn("Anna is 29", '{"name": "Anna", "age": 29, "tags": []}', learn=learn)
    assert learned_text(Conversation((turn,))) == learned
