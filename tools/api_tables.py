"""Writes the tables of request fields in docs/api from the request models.

    python -m tools.api_tables

A table stands between two comments, `<!-- fields: ChatRequest -->` and `<!-- end of fields -->`;
the name is that of the request in the OpenAPI document.
"""

from __future__ import annotations

import re
from pathlib import Path

from services.router.openapi.components import MODELS
from services.router.request_model import (
    IGNORED,
    IGNORED_FIELDS,
    WARNED,
    WITHOUT_EFFECT,
    RequestModel,
)

PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
WITH_WARNINGS = ("ChatRequest", "CompletionRequest", "EmbeddingsRequest", "ResponsesRequest")
TABLE = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)


def table(models: tuple[type[RequestModel], ...], warns: bool = True) -> str:
    """Make the table of a request that has one form or several.

    Fields of one description share a row; fields that the request refuses have none. With `warns`
    the endpoint knows the fields that it ignores, and the table ends with them.
    """
    rows: dict[str, list[str]] = {}
    seen: set[str] = set()
    for model in models:
        for name, field in model.model_fields.items():
            if name in seen or name in model.refused or field.annotation is type(None):
                continue
            seen.add(name)
            description = " ".join((field.description or "").split())
            rows.setdefault(description, []).append(name)
    if warns:
        rows[IGNORED] = [*rows.pop(IGNORED, []), *sorted(IGNORED_FIELDS - seen)]
        rows[WARNED] = [*rows.pop(WARNED, []), *WITHOUT_EFFECT]
    lines = ["| Field | What it does |", "| --- | --- |"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in names)} | {what} |" for what, names in rows.items()
    ]
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """Return a page with its tables as they should be."""
    return TABLE.sub(_current, text)


def _current(match: re.Match[str]) -> str:
    begin, name, end = match.groups()
    return begin + table(MODELS[name], warns=name in WITH_WARNINGS) + end


if __name__ == "__main__":
    for page in PAGES.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
