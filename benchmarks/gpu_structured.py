"""Structured output on a GPU: what masks cost real steps, and whom.

    python -m benchmarks.gpu_structured [--models llama-1b llama-8b]

The whole server with random weights, 64 streams over HTTP, as `benchmarks.structured` does it on a
virtual device. A step's masks should be there before its forward pass ends: 2 ms with the smaller
model, 9 ms with the larger.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.load import ended, streams
from benchmarks.report import Report
from benchmarks.stack import Stack, scratch_folder
from benchmarks.structured import FREE, SETUPS, SLOW, Kind, ask, bodies
from services.bench.client import LoadResult

NEEDS_GPU = True
MAX_TOKENS = 256
REQUESTS = 4  # of each client
SERVED = {name: kinds for name, kinds in SETUPS.items() if all(k.name != SLOW for k in kinds)}


def tokens_per_s(outcome: LoadResult) -> float:
    """Tokens per second of a run in which every request writes as many; events may hold several."""
    return len(outcome.replies) * MAX_TOKENS / outcome.wall_s


def measure(stack: Stack, kinds: tuple[Kind, ...]) -> dict[str, float]:
    """Load the server with all kinds at once; tokens per second of each."""
    runs = {
        kind.name: streams(stack.port, bodies(kind, MAX_TOKENS), kind.num_streams, REQUESTS)
        for kind in kinds
    }
    for clients in runs.values():
        clients.start()
    return {name: tokens_per_s(ended(clients)) for name, clients in runs.items()}


def main() -> None:
    """Measure every model in turn and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama-1b", "llama-8b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="cuda, or sim to try this script")
    options = parser.parse_args()
    report = Report(
        "gpu_structured",
        "Structured output on a GPU",
        "64 streams over HTTP, 256 tokens a request, random weights in bfloat16, a vocabulary of "
        "128,256; a JSON schema that no answer completes. Output tokens per second of all streams "
        "of a kind.",
    )
    settings = {
        "model.served_name": "sim",
        "compute.max_model_len": 1024,
        "compute.speculative_config": "off",  # free text of random weights repeats itself
    }
    with scratch_folder() as scratch:
        for name in options.models:
            folder = make_folder(scratch / name, SHAPES[name])
            given = ["--device", options.device]
            if options.device == "cuda":
                given += ["--load-format", "dummy", "--dtype", "bfloat16"]
            with Stack(folder, *given, settings=settings) as stack:
                for kinds in SERVED.values():
                    ask(stack, kinds)
                    measure(stack, kinds)  # warm: grammars, connections, clocks
                rounds = [
                    {setup: measure(stack, kinds) for setup, kinds in SERVED.items()}
                    for _ in range(options.rounds)
                ]
            add_table(report, name, rounds)
    report.write()


def add_table(report: Report, name: str, rounds: list[dict[str, dict[str, float]]]) -> None:
    """Add one model's rates, and their ratios to as many unconstrained streams of the round."""
    rows: list[list[object]] = []
    for setup, kinds in SERVED.items():
        for kind in kinds:
            rates = [each[setup][kind.name] for each in rounds]
            share = kind.num_streams / SERVED[FREE][0].num_streams
            ratios = [
                rate / (share * each[FREE][FREE]) for rate, each in zip(rates, rounds, strict=True)
            ]
            rows.append([f"{setup}: {kind.name}", *rates, statistics.median(ratios)])
    numbers = [f"round {number}" for number in range(1, len(rounds) + 1)]
    report.text(f"## {name}")
    report.table(["tokens/s", *numbers, "of as many unconstrained"], rows)


if __name__ == "__main__":
    main()
