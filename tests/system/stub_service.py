"""A stand-in for a service: ready at once, an HTTP server if it is a router, obeys its arguments.

Arguments: run_dir, name, and words: `crash-once` dies before it is ready the first time, `crash`
every time, `misconfigured` ends with status 78, `misconfigured-later` in its second life,
`stubborn` ignores SIGTERM, `hang-once` says nothing more after its first second the first time,
`slow` says that it may be silent for days, `busy` computes while it is silent, `stop-once` is
stopped before it says anything the first time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from common.beacon import BeaconFile


def main() -> None:
    run_dir, name, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with (run_dir / "history").open("a") as history:
        history.write(f"{name} started\n")
    life = (run_dir / "history").read_text().splitlines().count(f"{name} started")
    sys.stdout.write(f"{name} says hello\n")
    sys.stdout.flush()
    first = not (run_dir / f"{name}.seen").exists()
    (run_dir / f"{name}.seen").touch()
    if "misconfigured" in words or ("misconfigured-later" in words and life == 2):
        sys.exit(78)
    if "crash" in words or ("crash-once" in words and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if "stop-once" in words and first:
        os.kill(os.getpid(), signal.SIGSTOP)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if "stubborn" in words else ended.set())
    hangs_at_s = time.monotonic() + 1.0
    if name.startswith("router"):
        threading.Thread(target=answer, daemon=True).start()
    beacon = BeaconFile(str(run_dir), name)
    while not ended.wait(0.05):
        if "hang-once" not in words or not first or time.monotonic() < hangs_at_s:
            beacon.update(True, time.monotonic(), 1e6 if "slow" in words else 0.0)
        while "busy" in words and time.monotonic() > hangs_at_s and not ended.is_set():
            sum(range(200_000))  # with a pause twice as long: seconds of it are left to other tests
            time.sleep(0.008)
    with (run_dir / "history").open("a") as history:
        history.write(f"{name} ended\n")


def answer() -> None:
    """Say 200 to everybody who connects to the inherited socket."""
    listener = socket.socket(fileno=int(os.environ["SLIPSTREAM_LISTEN_FD"]))
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.close()


if __name__ == "__main__":
    main()
