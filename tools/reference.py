"""Writes docs/configuration.md and docs/supported-models.md from the code: `make reference`.

A test compares both files with what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le

from common.architectures import ARCHITECTURES, REFUSED
from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from common.config import ENV_PREFIX
from common.gguf.architectures import ARCHITECTURES as GGUF
from common.gguf.architectures import MIXTURES
from common.gguf.file import TYPES
from common.pre_tokenizers import PRE_TOKENIZERS
from common.tiktoken_ranks import RANKED_KINDS
from services.cli import command_of
from services.compute.models.families import FAMILIES
from services.launcher.plan import SETTINGS, toml_value

DOCS = Path(__file__).resolve().parents[1] / "docs"
GENERATED = "<!-- Made by tools/reference.py; do not edit. -->\n\n"
CONFIGURATION = """\
# Configuration reference

Every setting of every table; [settings.md](settings.md) says where they can be given. A list is
written with commas in the environment. `slipstream serve` sets `[links]` by itself, except
`max_message_bytes`.

"""
COUNTS = """\
## Processes

How many processes of each service `slipstream serve` starts is no setting but an option:
`--tokenizers`, `--computes`, `--detokenizers` and `--routers`, 1 by default.
"""
MODELS = """\
# Supported models

A model is a folder in Hugging Face's layout, here or on the hub: `config.json`, `tokenizer.json`
and `*.safetensors`; or [a GGUF file](#gguf-files). Weights may be
[quantised](quantization.md#quantised-checkpoints). Those in pickle formats are never read, and code
that comes with a model is never run.

## Tokenizers

A `tokenizer.json` is read as it is. Where there is none, one is made of a tiktoken file at the
first start, with the ids that tiktoken gives, and kept in `~/.cache/slipstream/tokenizers` or below
`XDG_CACHE_HOME`; `tokenizer_class` in `tokenizer_config.json` decides. Of a model with neither no
weights are downloaded.

"""
BY_ARCHITECTURE = """
## Architectures

`architectures` in `config.json` decides. The same without its head (`LlamaModel` for
`LlamaForCausalLM`), with the pooling of sentence-transformers beside it, is an embedding model.

"""
FIELDS = """
## Fields of `config.json`

Of every architecture the sizes are read, with the rotation of positions: `rope_parameters`, or the
older `rope_theta`, `rope_scaling`, `partial_rotary_factor` and `rotary_dim`. Scaling may be
`default`, `linear`, `dynamic`, `llama3`, `yarn` or `longrope`; the stretched form is used for all
texts if the server's `max_model_len` is beyond the length that the model was first trained on. The
fields below are read beside them; a value that is not supported is refused by its field's name,
before weights are downloaded where the values stand here, else when the server starts. Other fields
are passed over, but for {refused}, which are refused where they are set in a family without them.
Of models with `dual_chunk_attention_config` (Qwen's of 1M) texts end at its
`original_max_position_embeddings`, up to which it changes nothing; the log says so.

"""
GGUF_FILES = """
## GGUF files

Files of llama.cpp are served by their path, split ones by that of any part, if llama.cpp calls
their architecture as below. [quantization.md](quantization.md#gguf-files) explains how.

"""
GGUF_TYPES = """
Tensors may be of the types {types}. Tokenizers may be of the kinds `llama`
(SentencePiece's BPE) and `gpt2` (byte-level BPE); texts may be split (`tokenizer.ggml.pre`) as
{pres} say.
"""
TOOL_CALLS = """
## Tool calls

The format is read off the chat template; [`tool_format`](configuration.md#tokenizer) overrides it.
A model whose template has none of these answers in plain text and cannot be required to call a
tool.

"""
REASONING = """
## Reasoning

The format is read off the chat template too, unless `reasoning_format` is set. Text between the
markers comes as `reasoning`.

"""


def configuration() -> str:
    options = options_of_serve()
    sections = []
    for table, kind in SETTINGS.items():
        rows = [
            (
                f"`{name}`",
                type_text(field.annotation, field.metadata),
                f"`{toml_value(field.default)}`",
                f"`{ENV_PREFIX}{table.upper()}__{name.upper()}`",
                options.get(f"{table}.{name}", ""),
                field.description or "",
            )
            for name, field in kind.model_fields.items()
        ]
        head = ("setting", "type", "default", "variable", "option", "what it is")
        sections.append(f"## {table}\n\n{table_text(head, rows)}\n")
    return GENERATED + CONFIGURATION + "".join(sections) + COUNTS


def supported_models() -> str:
    ranked = [
        (f"`{name}`", f"`{kind.file_name}`", kind.models) for name, kind in RANKED_KINDS.items()
    ]
    architectures = [
        (f"`{name}`", f"`{family.model_type}`", family.models)
        for name, family in ARCHITECTURES.items()
    ]
    fields = [
        (
            f"`{name}`",
            ", ".join(
                field_text(field, ARCHITECTURES[name].only.get(field, ()))
                for field in sorted({*family.config.model_fields, *ARCHITECTURES[name].only})
            ),
        )
        for name, family in FAMILIES.items()
    ]
    files = [(f"`{name}`", f"`{architecture.family}`") for name, architecture in GGUF.items()]
    files += [
        (f"`{name}`, with experts", f"`{architecture.family}`")
        for name, architecture in MIXTURES.items()
    ]
    types = codes(kind.name for kind in TYPES.values())
    calls = [
        (f"`{name}`", markers.models, codes((markers.begin, markers.end or markers.call_end)))
        for name, markers in TOOL_FORMATS.items()
    ]
    thoughts = [
        (f"`{name}`", markers.models, codes((markers.begin, markers.end)))
        for name, markers in REASONING_FORMATS.items()
    ]
    return (
        GENERATED
        + MODELS
        + table_text(("`tokenizer_class`", "file", "models"), ranked)
        + BY_ARCHITECTURE
        + table_text(("architecture", "`model_type`", "models"), architectures)
        + FIELDS.format(refused=codes(REFUSED))
        + table_text(("architecture", "fields"), fields)
        + GGUF_FILES
        + table_text(("in GGUF files", "architecture"), sorted(files))
        + GGUF_TYPES.format(types=types, pres=codes(filter(None, PRE_TOKENIZERS)))
        + TOOL_CALLS
        + table_text(("format", "models", "around calls"), calls)
        + REASONING
        + table_text(("format", "models", "around reasoning"), thoughts)
    )


def field_text(name: str, values: Iterable[Any]) -> str:
    written = codes(map(json.dumps, values))
    return f"`{name}`" + (f" ({written})" if written else "")


def options_of_serve() -> Mapping[str, str]:
    """Return the options by the setting that they are for."""
    actions = command_of("serve").parser("serve")._actions
    return {action.dest: codes(action.option_strings) or "`MODEL`" for action in actions}


def type_text(annotation: Any, metadata: Iterable[Any]) -> str:
    if get_origin(annotation) is Union or get_origin(annotation) is Literal:
        return codes(literals_in(annotation))
    if get_origin(annotation) is tuple:
        return "list of text"
    text = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}[annotation]
    for bound in metadata:
        match bound:
            case Ge(ge=limit):
                text += f", at least {limit}"
            case Gt(gt=limit):
                text += f", above {limit}"
            case Le(le=limit):
                text += f", at most {limit}"
    return text


def literals_in(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for member in get_args(annotation) for value in literals_in(member)]


def table_text(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [tuple(head)]
    cells += [("---",) * len(cells[0]), *(tuple(row) for row in rows)]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells
    )


def codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words if word)


def main() -> None:
    for name, text in (
        ("configuration.md", configuration()),
        ("supported-models.md", supported_models()),
    ):
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
