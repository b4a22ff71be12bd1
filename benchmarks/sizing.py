"""What does a request cost each service, and how much memory does each process take?

    python -m benchmarks.sizing [--requests 400]

Chats with an answer of one token, so that what is measured is the way there, against the virtual
device. Processor time is a service's with its children's. Memory is that of each process at the
start and after all chats, and after bodies large enough for the router's parser. The vocabularies
are the demo's and one of Llama's size, made on the spot.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.load import ended
from benchmarks.report import Report
from benchmarks.stack import ROOT, Stack, cpu_s, rss_mib, scratch_folder
from services.bench.client import Clients, OfferedLoad, ServerAddress

PATH = "/v1/chat/completions"
NUM_STREAMS = 16
SENTENCE = "The keeper of the lighthouse counted 27 ships, and wrote their names into a book. "
CHATS = {"75 bytes": 1, "4 KB": 50, "400 KB, cut": 5000}  # repetitions of the sentence
LARGE = "400 KB, cut"  # over 256 KiB: parsed by a process of the router's
NUM_LARGE = 40


def body(text: str) -> dict[str, object]:
    """Return a chat with an answer of one token, of the beginning of a text that is too long."""
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": True,
        "truncate_prompt_tokens": -1,
    }


def ask(stack: Stack, num_sentences: int, count: int) -> dict[str, float]:
    """Ask so many times; returns the processor milliseconds of a request at each service."""
    server = ServerAddress("127.0.0.1", stack.port)
    pids = stack.pids()
    clients = Clients(
        server,
        OfferedLoad((server.post(PATH, body(SENTENCE * num_sentences)),) * count, NUM_STREAMS),
        1,
    )
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    clients.start()
    ended(clients)
    return {name: 1e3 * (cpu_s(pid) - before_s[name]) / count for name, pid in pids.items()}


def memory(stack: Stack) -> dict[str, float]:
    """Return the MiB that each process has in use."""
    return {name: rss_mib(pid) for name, pid in stack.processes().items()}


def measure(report: Report, title: str, folder: Path, count: int) -> None:
    """Start a server for a folder, and report what chats cost it."""
    with Stack(folder, "--device", "sim", settings={"compute.sim_step_base_s": 0}) as stack:
        start = memory(stack)
        ask(stack, 1, NUM_STREAMS)
        costs = {
            name: ask(stack, num_sentences, NUM_LARGE if name == LARGE else count)
            for name, num_sentences in CHATS.items()
        }
        end = memory(stack)
    report.text(f"## {title}")
    services = list(costs["4 KB"])
    report.table(
        ["processor ms a chat", *services],
        [[name, *(cost[each] for each in services)] for name, cost in costs.items()],
    )
    report.table(
        ["MiB in use", "at the start", "at the end"],
        [[name, start.get(name, "not there"), mib] for name, mib in end.items()],
    )


def main() -> None:
    """Measure both vocabularies and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=400)
    count = parser.parse_args().requests
    report = Report(
        "sizing",
        "What chats cost the services, and their processes' memory",
        "For the sizing table of docs/operations.md; what a streamed token costs is on ring.md.",
    )
    measure(report, "The demo's vocabulary: 3,072 tokens", ROOT / "models" / "demo", count)
    with scratch_folder() as scratch:
        folder = make_folder(scratch / "llama", SHAPES["llama-1b"])
        measure(report, "A vocabulary of Llama's size: 128,256 tokens", folder, count)
    report.write()


if __name__ == "__main__":
    main()
