"""Writes settings as TOML, which the standard library only reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from common.config import Tables


def toml_text(tables: Tables) -> str:
    """Return the text of a settings file that reads back as these tables."""
    parts = []
    for table, values in tables.items():
        lines = [f"{_value(str(key))} = {_value(value)}\n" for key, value in values.items()]
        parts.append(f"[{table}]\n" + "".join(lines))
    return "\n".join(parts)


def write_private(path: str, text: str) -> None:
    """Write a file that only this user can read: API keys may stand in it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = ", ".join(f"{_value(str(key))} = {_value(item)}" for key, item in value.items())
        return "{" + items + "}"
    return str(value)  # numbers and dates, as TOML writes them
