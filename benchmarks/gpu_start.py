"""How long a server takes to be ready on a GPU, and which part of the start takes how long.

    python -m benchmarks.gpu_start [--models llama-8b] [--times 2]

Dummy weights; the first start may compile kernels, those after it find them on disk.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from datetime import datetime

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.gpu_server import Server, Setup
from benchmarks.stack import scratch_folder

NEEDS_GPU = True  # `python -m benchmarks` leaves it out where there is none
OURS = ("service", "instance", "level", "logger", "timestamp", "event", "seconds")


def parts(log: str, began_s: float) -> Iterator[str]:
    """Lines of a server's log as text: when, who, what."""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        at = datetime.fromisoformat(entry["timestamp"]).timestamp() - began_s
        more = {key: value for key, value in entry.items() if key not in OURS}
        took = f"{entry['seconds']:6.2f} s" if "seconds" in entry else " " * 8
        yield f"  {at:6.2f} {took} {entry.get('service', ''):12} {entry['event']} {more or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="llama-8b")
    parser.add_argument("--times", type=int, default=2)
    arguments = parser.parse_args()
    with scratch_folder() as scratch:
        for model in arguments.models.split(","):
            folder = make_folder(scratch / model, SHAPES[model])
            for number in range(1, arguments.times + 1):
                began_s = time.time()
                with Server(Setup(), folder) as server:
                    print(f"{model}, start {number}: ready after {server.start_s:.2f} s")
                    print("\n".join(parts(server.stack.log(), began_s)), flush=True)


if __name__ == "__main__":
    main()
