"""`python -m services.tokenizer`: one tokenizer as a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from common.chat_formats import formats_of
from common.child_process import Exited, PipedChild, Received
from common.config import ServiceConfig
from common.messages.tokenize import TokenizerInbox
from common.model_folder import locate, read_json
from common.registration import Registration
from common.service import service_main
from common.tokenizer_folder import describe_worker
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import EncoderSettings
from services.tokenizer.pool import Pool


def make(config: ServiceConfig[TokenizerSettings]) -> TokenizerActor:
    """Build the actor; ModelError when the model folder cannot be used."""
    own = config.own
    folder = locate(config.model.path, config.model.revision)
    card = describe_worker(folder, config.model.served_name)
    shared = [field.name for field in fields(EncoderSettings) if field.name != "folder"]
    encoder = EncoderSettings(str(folder), **{name: getattr(own, name) for name in shared})
    settings_json = json.dumps(asdict(encoder))

    def spawn(received: Received, exited: Exited) -> PipedChild:
        return PipedChild("services.tokenizer.worker", [settings_json], received, exited)

    registration = Registration("tokenizer", config.links.routers)
    about = json.dumps(_about(folder, own)).encode()
    return TokenizerActor(own, card, Pool(own, spawn), registration, about=about)


def _about(folder: Path, settings: TokenizerSettings) -> dict[str, Any]:
    """Describe the tokenizer: its folder's settings, its chat template, its answer formats."""
    config = read_json(folder, "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text("utf-8")
    source = config.get("chat_template")
    text = source if isinstance(source, str) else json.dumps(source or "")
    tools, reasoning = formats_of(text, settings.tool_format, settings.reasoning_format)
    return {**config, "tool_format": tools, "reasoning_format": reasoning}


if __name__ == "__main__":
    sys.exit(service_main("tokenizer", TokenizerSettings, TokenizerInbox, make))
