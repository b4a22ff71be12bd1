"""The end of real links: what is not waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from common.messages.address import Address
from common.messages.control import RouterAlive
from tests.patience import PATIENCE_S
from tests.system.link_boxes import Box, ipc_settings

FOREVER_S = 3600.0


def test_a_heartbeat_to_a_dead_peer_holds_up_no_end(tmp_path: Path) -> None:
    async def main() -> None:
        settings = ipc_settings(tmp_path)
        leaving = Box(settings, "router-0").open()
        leaving.transport.patience_s = FOREVER_S
        absent = Address(f"ipc://{settings.run_dir}/nobody.sock", "x")
        leaving.transport.send(absent, RouterAlive(leaving.transport.address, 1))
        async with asyncio.timeout(PATIENCE_S):
            await leaving.transport.close(FOREVER_S)

    uvloop.run(main())
