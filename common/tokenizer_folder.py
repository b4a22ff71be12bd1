"""The tokenizer in a Hugging Face model folder: vocabulary, special tokens, chat templates.

It reads files as transformers does, so that the same folder gives the same ids and the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.errors import ModelError
from common.messages.control import ModelCard
from common.model_folder import REVISION_DIGITS, describe, read_json
from common.text_growth import check_growth
from common.tokenizer_file import needed_tokenizer_file

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
_TOKEN_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_ADDED_TOKEN_FIELDS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The tokenizer settings of one model folder.

    `file` is its tokenizer.json, which may be in a cache.
    `special_tokens` are the named ones ("bos_token": "<s>"), as chat templates see them.
    `added_tokens` are to be in the vocabulary even if tokenizer.json does not list them.
    `templates` holds chat templates by name; it is empty for a model without any.
    """

    path: Path
    file: Path
    special_tokens: dict[str, str]
    added_tokens: tuple[AddedToken, ...]
    templates: dict[str, str]

    def template_for(self, has_tools: bool) -> str | None:
        """Choose the template as transformers does; None when there is none to choose."""
        if has_tools and TOOL_TEMPLATE in self.templates:
            return self.templates[TOOL_TEMPLATE]
        return self.templates.get(DEFAULT_TEMPLATE)


def read_folder(path: Path, chat_template: str = "") -> TokenizerFolder:
    """Read a folder's tokenizer settings; ModelError names the file that does not fit.

    `chat_template` is a file to use in place of the folder's own templates.
    """
    file = needed_tokenizer_file(path)
    config = read_json(path, "tokenizer_config.json")
    named = dict(config)
    if "added_tokens_decoder" not in config:  # older folders: the map is the authority
        named.update(read_json(path, "special_tokens_map.json"))
    special = _special_tokens(named)
    return TokenizerFolder(
        path=path,
        file=file,
        special_tokens={name: _text(token) for name, token in special.items()},
        added_tokens=_added_tokens(config, named, special),
        templates=_template_in(chat_template) if chat_template else _templates(path, config),
    )


def load_tokenizer(folder: TokenizerFolder) -> Tokenizer:
    """Load the vocabulary and add the tokens that only tokenizer_config.json names."""
    file = folder.file
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be loaded: {error}") from error
    try:
        check_growth(tokenizer)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error
    # Truncation and padding are meant for training batches; they would cut or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {str(token.content) for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in folder.added_tokens if token.content not in known]
    if missing:
        tokenizer.add_tokens(missing)
    return tokenizer


def describe_worker(path: Path, served_names: Sequence[str] = ()) -> ModelCard:
    """Return the card of the model in a folder, as `describe` does, with its vocabulary."""
    return replace(describe(path, served_names), vocabulary=vocabulary_of(path))


def vocabulary_of(path: Path) -> str:
    """Hash what tokenizing, chat templates and detokenizing depend on, and nothing else.

    So models of several sizes, fine-tuned or quantised, have one vocabulary. It is empty for a
    folder without a tokenizer that can be read.
    """
    try:
        folder = read_folder(path)
        vocabulary = read_json(folder.file.parent, folder.file.name)
    except ModelError:
        return ""
    for training in ("truncation", "padding"):  # which `load_tokenizer` switches off
        vocabulary.pop(training, None)
    tokens = [
        [token.content, *(getattr(token, name) for name in _ADDED_TOKEN_FIELDS)]
        for token in folder.added_tokens
    ]
    loaded = [vocabulary, tokens, folder.special_tokens, folder.templates]
    text = json.dumps(loaded, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:REVISION_DIGITS]


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    tokens: dict[str, Any] = {}
    for name in dict.fromkeys((*_TOKEN_NAMES, *config)):
        value = config.get(name) if name.endswith("_token") else None
        if isinstance(value, str) or (isinstance(value, dict) and "content" in value):
            tokens[name] = value
    extra = config.get("extra_special_tokens")
    return {**tokens, **extra} if isinstance(extra, dict) else tokens


def _added_tokens(
    config: dict[str, Any], named: dict[str, Any], special: dict[str, Any]
) -> tuple[AddedToken, ...]:
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelError("tokenizer_config.json: added_tokens_decoder must be an object")
    tokens = [_added_token(decoder[index]) for index in sorted(decoder, key=int)]
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or ()
    unnamed = extra if isinstance(extra, list) else ()
    seen = {token.content for token in tokens}
    for value in (*special.values(), *unnamed):
        if _text(value) not in seen:
            seen.add(_text(value))
            tokens.append(_added_token(value))
    return tuple(tokens)


def _added_token(value: Any) -> AddedToken:
    if isinstance(value, dict):
        flags = {name: bool(value[name]) for name in _ADDED_TOKEN_FIELDS if name in value}
        return AddedToken(_text(value), **{"special": True, **flags})
    return AddedToken(_text(value), special=True)


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _template_in(file: str) -> dict[str, str]:
    try:
        return {DEFAULT_TEMPLATE: Path(file).read_text("utf-8")}
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {file} cannot be read: {error}") from error


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    files = {
        file.stem: file.read_text("utf-8")
        for file in sorted((path / "additional_chat_templates").glob("*.jinja"))
    }
    single = path / "chat_template.jinja"
    if single.is_file():
        files[DEFAULT_TEMPLATE] = single.read_text("utf-8")
    if files:  # files of their own take the place of what the settings hold
        return files
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a text or a list of "
            "objects with a name and a template"
        ) from error
