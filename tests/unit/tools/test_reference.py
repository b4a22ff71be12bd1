"""The reference documents say what the code says."""

from __future__ import annotations

import pytest

from services.launcher.plan import SETTINGS
from tools import reference


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("configuration.md", reference.configuration()),
        ("supported-models.md", reference.supported_models()),
    ],
)
def test_a_reference_document_is_current(name: str, text: str) -> None:
    path = reference.DOCS / name
    assert path.read_text("utf-8") == text, f"`make reference` writes docs/{name} anew"


def test_every_setting_says_what_it_is() -> None:
    fields = {
        f"{table}.{name}": field
        for table, kind in SETTINGS.items()
        for name, field in kind.model_fields.items()
    }
    assert [name for name, field in fields.items() if not field.description] == []
