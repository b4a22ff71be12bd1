"""What is written as TOML reads back the same."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.config import TABLES
from services.launcher.settings_file import toml_text

texts = st.text(st.characters(exclude_categories=["Cs"]))
plain: st.SearchStrategy[Any] = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.lists(texts, max_size=3)
    | st.dictionaries(texts, st.integers(0, 9), max_size=3)
)


@given(st.dictionaries(st.sampled_from(TABLES), st.dictionaries(texts, plain, max_size=4)))
def test_tables_read_back_as_they_were(tables: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(toml_text(tables)) == tables
