"""`python -m services.tokenizer`: one tokenizer as a process of its own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.chat_formats import reasoning_format_of, tool_format_of
from common.child_process import Exited, PipedChild, Received
from common.config import ServiceConfig
from common.messages.tokenize import TokenizerInbox
from common.model_folder import describe, locate, read_json
from common.registration import Registration
from common.service import service_main
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import EncoderSettings
from services.tokenizer.pool import Pool, PoolSettings


def make(config: ServiceConfig[TokenizerSettings]) -> TokenizerActor:
    """Build the actor; ModelError when the model folder cannot be used."""
    own = config.own
    folder = locate(config.model.path, config.model.revision)
    # Lengths are 0 in a card of a worker that does not decide them.
    card = replace(describe(folder, config.model.served_name), max_model_len=0)
    encoder = EncoderSettings(
        folder=str(folder),
        max_prompt_bytes=own.max_prompt_bytes,
        template_timeout_s=own.template_timeout_s,
        template_memory_mb=own.template_memory_mb,
        tool_format=own.tool_format,
        reasoning_format=own.reasoning_format,
        template_kwargs=own.template_kwargs,
        chat_template=own.chat_template,
    )
    settings_json = json.dumps(asdict(encoder))

    def spawn(received: Received, exited: Exited) -> PipedChild:
        return PipedChild("services.tokenizer.worker", [settings_json], received, exited)

    pool_settings = PoolSettings(
        num_processes=own.pool_size or _default_pool_size(),
        template_timeout_s=own.template_timeout_s,
        encode_timeout_s=own.encode_timeout_s,
    )
    registration = Registration("tokenizer", config.links.routers)
    about = json.dumps(_about(folder, own)).encode()
    return TokenizerActor(own, card, Pool(pool_settings, spawn), registration, about=about)


def _about(folder: Path, settings: TokenizerSettings) -> dict[str, Any]:
    """Describe the tokenizer: its folder's settings, its chat template, its answer formats."""
    config = read_json(folder, "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text("utf-8")
    source = config.get("chat_template")
    text = source if isinstance(source, str) else json.dumps(source or "")
    tools, reasoning = settings.tool_format, settings.reasoning_format
    return {
        **config,
        "tool_format": tool_format_of(text) if tools == "auto" else tools,
        "reasoning_format": reasoning_format_of(text) if reasoning == "auto" else reasoning,
    }


def _default_pool_size() -> int:
    return 4 if (os.cpu_count() or 1) >= 16 else 2


if __name__ == "__main__":
    sys.exit(service_main("tokenizer", TokenizerSettings, TokenizerInbox, make))
