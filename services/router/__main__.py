"""`python -m services.router`."""

from __future__ import annotations

import sys

from common.messages.text import RouterInbox
from common.service import service_main
from services.router.actor import RouterActor
from services.router.config import RouterSettings

if __name__ == "__main__":
    sys.exit(
        service_main(
            "router",
            RouterSettings,
            RouterInbox,
            lambda config: RouterActor(config.own, config.listen_fd),
        )
    )
