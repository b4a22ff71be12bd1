"""Knocks at the inboxes of a running deployment with no key, an unknown key and a known one.

Run in a container on the network of the links, with the deployment's keys in /keys. Prints a JSON
object: by key, by endpoint, how the handshake ended and whether a message could be sent.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

PATIENCE_S = 5.0
ENDINGS = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "let in",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
    zmq.EVENT_DISCONNECTED: "refused",
}


def key_of(name: str) -> bytes:
    return Path("/keys", name).read_bytes().strip()


def knock(endpoint: str, pair: tuple[bytes, bytes] | None) -> dict[str, object]:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued before a handshake
    if pair is not None:
        push.setsockopt(zmq.CURVE_SERVERKEY, key_of("server.public"))
        push.setsockopt(zmq.CURVE_PUBLICKEY, pair[0])
        push.setsockopt(zmq.CURVE_SECRETKEY, pair[1])
    monitor = push.get_monitor_socket()
    push.connect(endpoint)
    ending = "no answer"
    deadline_s = time.monotonic() + PATIENCE_S
    while ending == "no answer" and time.monotonic() < deadline_s:
        if monitor.poll(200):
            ending = ENDINGS.get(recv_monitor_message(monitor)["event"], ending)
    push.setsockopt(zmq.SNDTIMEO, 500)  # long enough for a second try, after 100 ms
    try:
        push.send(b"let me in")
        sent = True
    except zmq.Again:
        sent = False
    context.destroy(linger=1000)
    return {"handshake": ending, "sent": sent}


def main() -> None:
    endpoints = []
    for name in sys.argv[1:]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        endpoints += [f"tcp://{host}:7000" for host in sorted({str(each[4][0]) for each in found})]
    pairs = {
        "no key": None,
        "an unknown key": zmq.curve_keypair(),
        "a known key": (key_of("tokenizer.public"), key_of("tokenizer.secret")),
    }
    answers = {who: {each: knock(each, pair) for each in endpoints} for who, pair in pairs.items()}
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
