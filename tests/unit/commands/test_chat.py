"""What `slipstream chat` does by itself; tests/system/test_chat.py has it on a terminal."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from services.commands.chat import signals_noticed


class Handled(Exception):
    """What the handler of this test raises."""


def test_a_signal_that_interrupts_nothing_is_noticed_in_the_middle_of_a_wait() -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise Handled

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # another thread receives it
    read_fd, write_fd = os.pipe()
    try:
        with pytest.raises(Handled), signals_noticed():
            threading.Timer(0.1, send).start()
            os.read(read_fd, 1)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, before)
        os.close(read_fd)
        os.close(write_fd)
