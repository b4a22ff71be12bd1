"""What a supervisor reads from its children: all of it, and each pipe once to its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from services.launcher.child import Child
from services.launcher.supervisor import Supervisor


class Spoken(Child):
    """A child that is gone, while somebody still holds the writing end of its output."""

    def start(self) -> int:
        read_fd, self.write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        return read_fd


async def test_output_that_ends_while_the_launch_ends_is_read_once_to_its_end(
    tmp_path: Path,
) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    child, lines = Spoken("router-0", (), {}, ()), list[tuple[str, str]]()
    supervisor = Supervisor(
        ["router-0"], lambda name: child, str(tmp_path), 1.0, lambda *line: lines.append(line)
    )
    running = asyncio.create_task(supervisor.run(None, lambda s: None))
    await asyncio.sleep(0)
    os.write(child.write_fd, b"the last words")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    supervisor.end()
    os.close(child.write_fd)  # both the end of the launch and that of the pipe are due now
    await running
    await asyncio.sleep(0)
    assert errors == []
    assert lines == [("router-0", "the last words")]
