"""Variables of the chat template: what requests may set is a list, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from services.tokenizer.chat_renderer import RESERVED_KWARGS, check_kwargs
from services.tokenizer.config import WELL_KNOWN_TEMPLATE_KWARGS as WELL_KNOWN
from services.tokenizer.jobs import Refused


def refused(variables: dict[str, Any], template: str = "", allowed: Any = WELL_KNOWN) -> str:
    with pytest.raises(Refused) as caught:
        check_kwargs(variables, allowed, template)
    failure = caught.value.failure
    assert failure.status == 400 and failure.field is not None
    return failure.field


def test_what_well_known_templates_read_may_be_set() -> None:
    check_kwargs(
        {"enable_thinking": False, "reasoning_effort": "high", "thinking_budget": 100},
        WELL_KNOWN,
        "",
    )
    check_kwargs({"documents": [{"title": "a", "text": "b"}]}, WELL_KNOWN, "{{ documents }}")
    check_kwargs({"documents": []}, WELL_KNOWN, "")
    check_kwargs({"shout": 1}, ("shout",), "")


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "tokenize",
        "messages",
        "tools",
        "bos_token",
        "raise_exception",
        "loop",
        "namespace",
        "strftime_now",
        "self",
        "__class__",
        "tokenizer",
        "eos_token",
        "custom_tools",
        "",
    ],
)
def test_whatever_else_a_template_can_see_may_not(name: str) -> None:
    assert refused({"enable_thinking": True, name: "x"}) == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_arguments_of_the_call_stay_reserved_even_if_listed(name: str) -> None:
    assert refused({name: True}, allowed=(name,)) == f"chat_template_kwargs.{name}"


def test_documents_need_a_template_that_reads_them() -> None:
    documents = {"documents": [{"text": "x"}]}
    assert refused(documents, "{{ messages }}") == "documents"


def test_values_are_bounded_in_number() -> None:
    assert refused({"thinking": {"a": [0] * 5000}}) == "chat_template_kwargs.thinking"
    check_kwargs({"thinking": {"a": [[[{"b": [1]}]]]}}, WELL_KNOWN, "")


def test_a_refusal_says_what_may_be_set() -> None:
    with pytest.raises(Refused, match="a, b"):
        check_kwargs({"c": 1}, ("b", "a"), "")
