"""Prompts become ids, or a refusal that names the field at fault."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from common.messages.arrays import int32s
from common.messages.tokenize import (
    ChatPrompt,
    IdsPrompt,
    OutputRules,
    TextPrompt,
    ToolUse,
)
from services.tokenizer.jobs import EncoderSettings, Job, TextBound
from services.tokenizer.worker import MAX_STRS, PromptEncoder
from tests.unit.tokenizer.encoders import HELLO, TEMPLATE, TOOL, chat, encoder, refused, speaking
from tests.unit.tokenizer.vocabularies import byte_level, write_folder


def test_a_chat_is_rendered_and_encoded_without_further_special_tokens(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    expected = "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n"
    plain = subject.run(Job(TextPrompt(expected, add_special_tokens=False), 0.0))
    assert subject.run(chat(HELLO)).ids == plain.ids


def test_a_text_gets_its_special_tokens_if_asked(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    with_bos = subject.run(Job(TextPrompt("hello"), 0.0)).ids
    without = subject.run(Job(TextPrompt("hello", add_special_tokens=False), 0.0)).ids
    assert with_bos == array("i", [0]) + without


def test_a_prediction_is_encoded_as_it_is(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    expected = subject.run(Job(TextPrompt("hello", add_special_tokens=False), 0.0)).ids
    outcome = subject.run(replace(chat(HELLO), prediction="hello"))
    assert outcome.answer.prediction_ids == expected.tobytes()
    wrong = subject.run(replace(chat(HELLO), prediction="\ud800")).failure
    assert wrong is not None
    assert (wrong.code, wrong.field) == ("invalid_unicode", "prediction")


def test_token_strings_come_on_request_also_for_ids(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    outcome = subject.run(Job(TextPrompt("a b"), 0.0, want_strs=True))
    assert outcome.strs == ("<s>", "a", "Ġb")
    again = subject.run(Job(IdsPrompt(outcome.ids), 0.0, want_strs=True))
    assert again.strs == outcome.strs
    assert subject.run(Job(IdsPrompt(int32s([99999])), 0.0, want_strs=True)).strs == ("",)


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    job = chat(HELLO, tools_json=b'[{"a": 1}]', template_kwargs_json=b'{"shout": "HEY"}')
    strs = subject.run(Job(job.prompt, 0.0, want_strs=True)).strs
    assert "".join(strs).replace("Ġ", " ").endswith("HEY1 tools")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"messages_json": b"{"}, "template_error", None),
        ({"messages_json": b"{}"}, "template_error", None),
        ({"messages_json": b"[" * 100_000}, "template_error", None),
        ({"messages_json": b"[1]"}, "template_error", None),
        ({"messages_json": b"[]"}, "template_error", None),
        ({"tools_json": b"{"}, "template_error", None),
        (
            {"template_kwargs_json": b'{"messages": []}'},
            "invalid_value",
            "chat_template_kwargs.messages",
        ),
        (
            {"template_kwargs_json": b'{"chat_template": "{{ 1 }}"}'},
            "invalid_value",
            "chat_template_kwargs.chat_template",
        ),
        (
            {"template_kwargs_json": b'{"raise_exception": 1}'},
            "invalid_value",
            "chat_template_kwargs.raise_exception",
        ),
        ({"template_kwargs_json": b'{"shout": 1}'}, None, None),
    ],
)
def test_bad_input_is_refused_by_field(
    fields: dict[str, bytes], code: str | None, field: str | None, tmp_path: Path
) -> None:
    prompt = ChatPrompt(**{"messages_json": json.dumps(HELLO).encode(), **fields})
    outcome = encoder(tmp_path).run(Job(prompt, 0.0))
    failure = outcome.failure
    if code is None:
        assert failure is None
        return
    assert failure is not None
    assert (failure.status, failure.code, failure.field) == (400, code, field)
    assert not failure.retryable


def test_what_a_template_raises_is_told_to_the_client(tmp_path: Path) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    subject = encoder(tmp_path, chat_template=source)
    failure = refused(subject, chat([{"role": "system", "content": "x"}]))
    assert failure.code == "template_error" and "no system" in failure.message
    assert subject.run(chat(HELLO)).ids


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ a.b.c }}", "{{ messages.pop() }}"])
def test_a_template_that_fails_is_the_requests_failure(source: str, tmp_path: Path) -> None:
    assert refused(encoder(tmp_path, chat_template=source), chat(HELLO)).code == "template_error"


def test_endless_recursion_of_a_macro_is_caught(tmp_path: Path) -> None:
    source = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"
    assert refused(encoder(tmp_path, chat_template=source), chat(HELLO)).code == "template_error"


def test_a_model_without_a_template_refuses_chats_only(tmp_path: Path) -> None:
    subject = encoder(tmp_path, chat_template=None)
    failure = refused(subject, chat(HELLO))
    assert failure.code == "no_chat_template" and "/v1/completions" in failure.message
    assert subject.run(Job(TextPrompt("x"), 0.0)).ids


def test_a_template_that_does_not_compile_leaves_completions_working(tmp_path: Path) -> None:
    subject = encoder(tmp_path, chat_template="{% if %}")
    assert "does not compile" in refused(subject, chat(HELLO)).message
    assert subject.run(Job(TextPrompt("x"), 0.0)).ids


def test_a_template_that_blows_the_prompt_up_is_stopped(tmp_path: Path) -> None:
    subject = encoder(tmp_path, chat_template="{{ 'a' * 4001 }}")
    failure = refused(subject, chat(HELLO))
    assert (failure.status, failure.code) == (413, "prompt_too_large")


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    job = Job(ChatPrompt(rb'[{"role": "user", "content": "\ud800"}]'), 0.0)
    assert refused(subject, job).code == "invalid_unicode"


def test_media_are_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    failure = refused(encoder(tmp_path), chat(messages))
    assert (failure.code, failure.field) == ("unsupported_content", "messages[0].content[0]")


def test_memory_that_runs_out_retires_the_process(tmp_path: Path) -> None:
    subject = encoder(tmp_path)

    @contextmanager
    def limits() -> Iterator[None]:
        yield
        raise MemoryError

    subject._chats._limits = limits
    outcome = subject.run(chat(HELLO))
    assert outcome.retiring
    assert outcome.failure is not None and "64 MiB" in outcome.failure.message


def test_everything_a_template_does_is_inside_the_limits(tmp_path: Path) -> None:
    entered: list[str] = []

    @contextmanager
    def limits() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    write_folder(tmp_path, byte_level(), chat_template=TEMPLATE)
    subject = PromptEncoder(EncoderSettings(str(tmp_path), 4000, 5.0, 64), limits)
    assert entered == ["in", "out"], "compiling"
    subject.run(chat(HELLO))
    assert entered == ["in", "out"] * 2
    subject.run(Job(TextPrompt("x"), 0.0))
    assert entered == ["in", "out"] * 2


def test_the_demo_model_is_encoded_as_transformers_encodes_it() -> None:
    demo = Path(__file__).parents[3] / "models" / "demo"
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy? 🎉"},
    ]
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(demo))
    subject = PromptEncoder(EncoderSettings(str(demo), 4000, 5.0, 64), nullcontext)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert subject.run(chat(messages)).ids.tolist() == expected
    plain = subject.run(Job(TextPrompt("Once upon a time"), 0.0)).ids.tolist()
    assert plain == reference("Once upon a time")["input_ids"]


def test_counting_counts_tools_and_variables_as_generation_does(tmp_path: Path) -> None:
    subject = speaking(tmp_path, "qwen3_thinking")
    tools = json.dumps([TOOL]).encode()
    prompt = chat(
        HELLO, tools_json=tools, template_kwargs_json=b'{"enable_thinking": false}'
    ).prompt
    counted = subject.run(Job(prompt, 5.0)).ids
    generated = subject.run(Job(prompt, 5.0, rules=OutputRules(tools=ToolUse("auto")))).ids
    assert counted == generated
    assert len(counted) > len(subject.run(chat(HELLO, tools_json=tools)).ids)
    assert len(counted) > len(subject.run(chat(HELLO)).ids)


def test_a_chat_is_bounded_as_it_is_rendered(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    job = replace(chat([{"role": "user", "content": "a" * 400}]), bound=TextBound(10, 32))
    failure = refused(subject, job)
    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    assert failure.prompt_tokens > failure.most_prompt_tokens == 10
    whole = subject.run(replace(job, bound=TextBound())).ids
    assert subject.run(replace(job, bound=TextBound(20, 32))).ids == whole
    cut = subject.run(replace(job, bound=TextBound(10, 32, "left"))).ids
    assert cut == whole[-len(cut) :] and len(cut) < len(whole)


def test_names_of_tokens_are_bounded(tmp_path: Path) -> None:
    subject = encoder(tmp_path)
    ids = int32s([1] * (MAX_STRS + 1))
    assert refused(subject, Job(IdsPrompt(ids), 0.0, want_strs=True)).field == "return_token_strs"
    assert len(subject.run(Job(IdsPrompt(ids[1:]), 0.0, want_strs=True)).strs) == MAX_STRS
