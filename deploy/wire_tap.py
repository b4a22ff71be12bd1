"""Listens on all networks of a container for a text, until standard input ends.

Run in the network of the router's container, with the right NET_RAW. Prints "ready", and at the end
a JSON object: by port, how many bytes of TCP went by and in how many packets the text was seen.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys

ETH_P_ALL = 3
HEADER_BYTES = 14  # of Ethernet
PORTS = (8000, 7000)  # the API and the links


def main() -> None:
    text = sys.argv[1].encode()
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    num_bytes = dict.fromkeys(PORTS, 0)
    num_seen = dict.fromkeys(PORTS, 0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        readable, _, _ = select.select([tap, sys.stdin], [], [])
        if sys.stdin in readable:
            break
        packet = tap.recv(1 << 17)[HEADER_BYTES:]
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            continue
        segment = packet[(packet[0] & 15) * 4 :]
        for port in {*struct.unpack("!HH", segment[:4])} & {*PORTS}:
            num_bytes[port] += len(segment)
            num_seen[port] += text in segment
    sys.stdout.write(json.dumps({"bytes": num_bytes, "seen": num_seen}))


if __name__ == "__main__":
    main()
