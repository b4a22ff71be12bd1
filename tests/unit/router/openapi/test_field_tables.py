"""The tables of request fields in docs/api are those of the request models."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.router.openai.chat import ChatFields
from tools.api_tables import PAGES, TABLE, table, with_tables

TABLED = sorted(page for page in PAGES.glob("*.md") if TABLE.search(page.read_text()))


@pytest.mark.parametrize("page", TABLED, ids=lambda page: page.name)
def test_a_pages_tables_are_current(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text) == text, "run `python -m tools.api_tables`"


def test_every_field_of_a_chat_has_a_place_in_its_table() -> None:
    rows = table((ChatFields,))
    assert all(f"`{name}`" in rows for name in ChatFields.model_fields)


def test_the_pages_of_openais_endpoints_have_tables() -> None:
    pages = {page.name for page in TABLED}
    assert {"chat.md", "completions.md", "embeddings.md", "tokens.md"} <= pages
