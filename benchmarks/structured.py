"""Structured output against unconstrained: what masks cost, and that they cost only who has them.

    python -m benchmarks.structured [--requests 8] [--rounds 3]

The whole server on a virtual device with a step of 5 ms, 64 streams over HTTP. What a request asks
for is random text; the virtual device writes any token that a mask allows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import ended, event_times_s, middle_of, run, streams
from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, scratch_folder
from common.model_folder import describe
from services.bench.client import LoadResult

STEP_S = 0.005
NUM_STREAMS = 64
MAX_TOKENS = 96
WIDE_VOCABULARY = 128_256
WARMUP_SHARE = 0.2  # of the time, at either end, is left out
DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "customer": {"type": "string"},
        "status": {"enum": ["new", "paid", "sent"]},
        "lines": {
            "type": "array",
            "minItems": 40,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "count": {"type": "integer"},
                    "price": {"type": "number"},
                    "gift": {"type": "boolean"},
                },
                "required": ["name", "count", "price", "gift"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "customer", "status", "lines"],
    "additionalProperties": False,
}
"""Long enough that every answer ends by its length: all do the same number of tokens."""

AMBIGUOUS = 'start: s "b"\ns: s s | s s s | "a"\n'
"""Every mask takes longer than the one before, up to 0.7 s."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the loads that run at the same time: so many streams with the same rules."""

    name: str
    num_streams: int
    rules: dict[str, Any]


def schema_rules() -> dict[str, Any]:
    """The rules of structured requests."""
    schema = {"name": "order", "schema": ORDER, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


FREE = "unconstrained"
SLOW = "slow"
FREE_RULES: dict[str, Any] = {"ignore_eos": True}
SETUPS: dict[str, tuple[Kind, ...]] = {
    FREE: (Kind(FREE, NUM_STREAMS, FREE_RULES),),
    "structured": (Kind("structured", NUM_STREAMS, schema_rules()),),
    "half and half": (
        Kind(FREE, NUM_STREAMS // 2, FREE_RULES),
        Kind("structured", NUM_STREAMS // 2, schema_rules()),
    ),
    "with four slow grammars": (
        Kind(FREE, NUM_STREAMS // 2, FREE_RULES),
        Kind("structured", NUM_STREAMS // 2 - 4, schema_rules()),
        Kind(SLOW, 4, {"structured_outputs": {"grammar": AMBIGUOUS}}),
    ),
}


def save_wide_folder(folder: Path) -> Path:
    """A model folder with a vocabulary as large as today's models have, most of it made up."""
    save_folder(folder, ModelShape(vocab_size=WIDE_VOCABULARY), with_weights=False)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    dice = random.Random(7)
    parts = [first + vowel + last for first in "bdfgkl" for vowel in "aeiou" for last in " nrs"]
    syllables = [part.strip() for part in parts]
    while len(vocabulary) < WIDE_VOCABULARY:
        word = dice.choice(["", "\u0120"]) + "".join(dice.choices(syllables, k=dice.randint(2, 4)))
        vocabulary.setdefault(word, len(vocabulary))
    path.write_text(json.dumps(tokenizer))
    return folder


def measure(folder: Path, kinds: tuple[Kind, ...], requests_per_stream: int) -> dict[str, float]:
    """Start a server, load it with all kinds at once; tokens per second and stream of each.

    Slow requests are not waited for.
    """
    settings = {
        "model.served_name": "sim",
        "compute.sim_step_base_s": STEP_S,
        "compute.max_num_seqs": NUM_STREAMS,
        "compute.max_model_len": 1024,
    }
    with Stack(folder, "--device", "sim", settings=settings) as stack:
        ask(stack, kinds)
        runs = {
            kind.name: streams(stack.port, bodies(kind), kind.num_streams, requests_per_stream, 1)
            for kind in kinds
        }
        for clients in runs.values():
            clients.start()
        rates = {}
        for kind in kinds:
            if kind.name == SLOW:
                continue
            outcome = ended(runs[kind.name])
            rates[kind.name] = steady_tokens_per_s(outcome) / kind.num_streams
        if SLOW in runs:
            runs[SLOW].close()
    return rates


def ask(stack: Stack, kinds: tuple[Kind, ...]) -> None:
    """One request of each kind before, so that grammars are compiled and processes started."""
    for kind in kinds:
        run(streams(stack.port, ({**bodies(kind)[0], "max_tokens": 4},), 1))


def bodies(kind: Kind, max_tokens: int = MAX_TOKENS) -> tuple[dict[str, Any], ...]:
    """What the clients of a kind ask, in turn."""
    return tuple(
        {
            "model": "sim",
            "prompt": f"Client {number} asks",
            "max_tokens": max_tokens,
            "seed": number,
            "stream": True,
            **kind.rules,
        }
        for number in range(kind.num_streams)
    )


def steady_tokens_per_s(outcome: LoadResult) -> float:
    """Events per second, without the beginning and the end of the run."""
    begin_s, end_s = middle_of(outcome, WARMUP_SHARE)
    times_s = (time_s for reply in outcome.replies for time_s in event_times_s(reply))
    return sum(begin_s <= time_s < end_s for time_s in times_s) / (end_s - begin_s)


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="of each client")
    parser.add_argument("--rounds", type=int, default=3, help="of all setups, in turn")
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {}
    with scratch_folder() as scratch:
        for name, folder in {
            "The demo's vocabulary": DEMO,
            "A large vocabulary": save_wide_folder(scratch / "wide"),
        }.items():
            title = f"{name}: {describe(folder).vocab_size:,} tokens"
            rounds[title] = [
                {
                    setup: measure(folder, kinds, arguments.requests)
                    for setup, kinds in SETUPS.items()
                }
                for _ in range(arguments.rounds)
            ]
    write_report(rounds)


def write_report(rounds: dict[str, list[dict[str, dict[str, float]]]]) -> None:
    """Write each round's rates, and the ratios to the unconstrained run of the same round."""
    report = Report(
        "structured",
        "Structured output against unconstrained",
        f"Targets, with {NUM_STREAMS} streams over HTTP and a device step of {STEP_S * 1e3:g} ms: "
        "with a JSON schema at least 0.9 of the tokens per second without; in a batch that is half "
        "and half the unconstrained half loses nothing (0.99 or better). Rates are of one stream, "
        f"whose ceiling is {1 / STEP_S:g} tokens/s; every request writes {MAX_TOKENS} tokens.",
    )
    for name, runs in rounds.items():
        rows: list[list[object]] = []
        for setup, kinds in SETUPS.items():
            for kind in (kind.name for kind in kinds if kind.name != SLOW):
                rates = [run[setup][kind] for run in runs]
                ratios = [run[setup][kind] / run[FREE][FREE] for run in runs]
                rows.append([f"{setup}: {kind}", *rates, statistics.median(ratios)])
        report.text(f"## {name}")
        numbers = [f"round {number}" for number in range(1, len(runs) + 1)]
        report.table(["tokens/s of a stream", *numbers, "of unconstrained"], rows)
    report.text(
        '`slow` are four streams under an ambiguous grammar (`s: s s | s s s | "a"`), a mask of '
        "which takes up to 0.7 s."
    )
    report.write()


if __name__ == "__main__":
    main()
