"""`python -m services.tokenizer`: one tokenizer as a process of its own."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from common.chat_formats import formats_of
from common.child_process import Exited, PipedChild, Received
from common.config import ServiceConfig
from common.messages.tokenize import ChatPrompt, TokenizerInbox
from common.model_folder import locate, read_json, read_pooling
from common.registration import Registration
from common.service import service_main
from common.tokenizer_folder import DEFAULT_TEMPLATE, describe_worker, read_folder
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import EncoderSettings, Job
from services.tokenizer.pool import Pool

FIRST_CHAT = ChatPrompt(b'[{"role": "user", "content": "Hi"}]')


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
    trial = Job(FIRST_CHAT, time.time()) if read_pooling(folder) is None else None
    pool = Pool(own, spawn, trial=trial)
    return TokenizerActor(own, card, pool, registration, about=about)


def _about(folder: Path, settings: TokenizerSettings) -> dict[str, Any]:
    """Describe the tokenizer: its folder's settings, its chat template, its answer formats."""
    config = read_json(folder, "tokenizer_config.json")
    templates = read_folder(folder, settings.chat_template).templates
    if templates:
        config["chat_template"] = templates.get(DEFAULT_TEMPLATE, templates)
    text = "".join(templates.values())
    tools, reasoning = formats_of(text, settings.tool_format, settings.reasoning_format)
    return {**config, "tool_format": tools, "reasoning_format": reasoning}


if __name__ == "__main__":
    sys.exit(service_main("tokenizer", TokenizerSettings, TokenizerInbox, make))
