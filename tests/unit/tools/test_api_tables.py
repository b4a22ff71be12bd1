"""The tables of request fields in docs/api are those of the request models."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.router.anthropic.requests import MessageFields
from services.router.ollama.requests import GenerateFields, OllamaChatFields
from services.router.openai.chat import ChatFields
from services.router.openapi.components import MODELS, request_schemas
from services.router.request_model import RequestModel
from services.router.responses.requests import ResponsesFields
from tools.api_tables import PAGES, TABLE, table, with_tables

TABLED = sorted(page for page in PAGES.glob("*.md") if TABLE.search(page.read_text()))


@pytest.mark.parametrize("page", TABLED, ids=lambda page: page.name)
def test_a_pages_tables_are_current(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text) == text, "run `python -m tools.api_tables`"


@pytest.mark.parametrize(
    "model", [ChatFields, ResponsesFields, MessageFields, OllamaChatFields, GenerateFields]
)
def test_every_field_that_a_request_may_have_is_in_its_table(model: type[RequestModel]) -> None:
    rows = table((model,))
    for name in model.model_fields.keys() - model.refused.keys():
        assert f"`{name}`" in rows


@pytest.mark.parametrize("name", MODELS)
def test_every_field_has_a_description_of_its_own(name: str) -> None:
    schema = request_schemas()[name]
    for form, model in zip(schema.get("anyOf", [schema]), MODELS[name], strict=True):
        fields = {
            field: form["properties"][field].get("description", "")
            for field, info in model.model_fields.items()
            if info.annotation is not type(None) and field not in model.refused
        }
        assert [field for field, description in fields.items() if not description] == []
        assert not [each for each in fields.values() if "](" in each or "\n" in each]


def test_the_pages_of_the_endpoints_that_take_requests_have_tables() -> None:
    pages = {page.name for page in TABLED}
    assert {"chat.md", "completions.md", "embeddings.md", "tokens.md"} <= pages
    assert {"responses.md", "messages.md", "ollama.md"} <= pages
