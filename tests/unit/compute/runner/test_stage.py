"""A stage that somebody starts by hand: it says where it waits, and Ctrl-C ends it quietly."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.unit.compute.distributed.model_processes import inboxes_of


def test_a_stage_says_where_it_waits_and_is_ended_by_ctrl_c_without_a_traceback() -> None:
    (inbox,) = inboxes_of(1)
    command = [sys.executable, "-m", "services.compute.runner.stage", inbox, "--insecure"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            f"slipstream stage: waits at {inbox} for the process that leads\n"
        )
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT
