"""The end of real links: what is waited for, and what is not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from common.messages.address import Address
from common.messages.control import RouterAlive
from tests.system.link_boxes import Box, abort, ipc_settings

FOREVER_S = 3600.0


def test_a_heartbeat_to_a_dead_peer_holds_up_no_end(tmp_path: Path) -> None:
    async def main() -> None:
        settings = ipc_settings(tmp_path)
        leaving = Box(settings, "router-0").open()
        leaving.mail.patience_s = FOREVER_S
        nobody = Address(f"ipc://{settings.run_dir}/nobody.sock", "x")
        leaving.mail.send(nobody, RouterAlive(leaving.mail.address, 1))
        async with asyncio.timeout(60):
            await leaving.mail.close(FOREVER_S)

    uvloop.run(main())


def test_other_mail_is_waited_for_until_its_peer_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        settings = ipc_settings(tmp_path)
        leaving = Box(settings, "compute-1").open()
        leaving.mail.patience_s = FOREVER_S
        late = Address(f"ipc://{settings.run_dir}/compute-0.sock", "")
        leaving.mail.send(late, RouterAlive(leaving.mail.address, 1))
        leaving.mail.send(late, abort(7))
        async with asyncio.timeout(60):
            closing = asyncio.ensure_future(leaving.mail.close(FOREVER_S))
            await asyncio.sleep(0)
            assert not closing.done()
            box = Box(settings, "compute-0").open()
            await closing
            await box.until(lambda: abort(7) in box.got)
            await box.mail.close(0.0)

    uvloop.run(main())
