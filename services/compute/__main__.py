"""`python -m services.compute`: one compute replica as a process of its own."""

from __future__ import annotations

import sys

from common.config import ServiceConfig
from common.messages.generate import ComputeInbox
from common.registration import Registration
from common.service import service_main
from services.compute.actor import ComputeActor
from services.compute.config import ComputeSettings
from services.compute.device import ModelDevice


def make(config: ServiceConfig[ComputeSettings]) -> ComputeActor:
    device = ModelDevice(config.model, config.own, config.links)
    return ComputeActor(config.own, device, Registration("compute", config.links.routers))


if __name__ == "__main__":
    sys.exit(service_main("compute", ComputeSettings, ComputeInbox, make))
