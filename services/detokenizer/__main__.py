"""`python -m services.detokenizer`: one detokenizer as a process of its own."""

from __future__ import annotations

import sys

from common.config import ServiceConfig
from common.messages.tokens import DetokenizerInbox
from common.model_folder import locate
from common.registration import Registration
from common.service import service_main
from services.detokenizer.actor import DetokenizerActor, load_card
from services.detokenizer.config import DetokenizerSettings


def make(config: ServiceConfig[DetokenizerSettings]) -> DetokenizerActor:
    """Put the actor together; ModelError when the model folder cannot be used."""
    folder = locate(config.model.path, config.model.revision)
    card = load_card(folder, config.model.served_name)
    registration = Registration("detokenizer", config.links.routers)
    return DetokenizerActor(config.own, folder, card, registration)


if __name__ == "__main__":
    sys.exit(service_main("detokenizer", DetokenizerSettings, DetokenizerInbox, make))
