"""What the prefix tree saves: time to first token with a prompt's first 512 tokens known.

    python -m benchmarks.prefix [--prefixes 7]

A real model of some 100 million (random) parameters in bfloat16 on the CPU, through the whole
server. Each prefix is asked for twice with different ends: the first time all of it is computed,
the second time only its end.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

from benchmarks.load import run, streams
from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, scratch_folder

SHAPE = ModelShape(
    vocab_size=16_384,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    max_model_len=1024,
    dtype="bfloat16",
    initializer_range=0.02,
)
PREFIX_TOKENS = 512
SUFFIX_TOKENS = 8


def num_parameters(shape: ModelShape) -> int:
    """Count the parameters of a model whose embeddings are not tied."""
    head_dim = shape.hidden_size // shape.num_heads
    attention = 2 * shape.hidden_size * head_dim * (shape.num_heads + shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    norms = 2 * shape.hidden_size
    return (
        2 * shape.vocab_size * shape.hidden_size
        + shape.num_layers * (attention + mlp + norms)
        + shape.hidden_size
    )


def ttft_s(stack: Stack, prompt: list[int]) -> float:
    """Return the time to the first token of a stream over HTTP."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 0,  # an event for every token, also where its text is held back
    }
    (reply,) = run(streams(stack.port, (body,), 1)).replies
    return reply.first_s - reply.sent_s


def measure(folder: Path, num_prefixes: int) -> tuple[list[float], list[float]]:
    """Return the times with an unknown and with a known prefix."""
    dice = random.Random(3)

    def ids(count: int) -> list[int]:
        return [dice.randrange(100, SHAPE.vocab_size) for _ in range(count)]

    cold, warm = [], []
    with Stack(folder, "--device", "cpu", "--dtype", "bfloat16") as stack:
        for number in range(num_prefixes + 1):
            prefix = ids(PREFIX_TOKENS)
            times = [ttft_s(stack, prefix + ids(SUFFIX_TOKENS)) for _ in range(2)]
            if number:  # the first warms the processes up
                cold.append(times[0])
                warm.append(times[1])
    return cold, warm


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefixes", type=int, default=7)
    arguments = parser.parse_args()
    with scratch_folder() as scratch:
        cold, warm = measure(save_folder(scratch / "model", SHAPE), arguments.prefixes)
    report = Report(
        "prefix",
        "A shared prefix",
        "Target: a known prefix of 512 tokens makes the time to the first token 5 times shorter.",
    )
    report.text(
        f"Llama-shaped, {num_parameters(SHAPE) / 1e6:.0f} million random parameters in bfloat16 "
        f"on the CPU; prompts of {PREFIX_TOKENS} + {SUFFIX_TOKENS} tokens, {arguments.prefixes} "
        "prefixes, one request at a time, over HTTP."
    )
    report.table(
        ["time to first token, ms", "median", "fastest", "slowest"],
        [
            [name, *(round(1e3 * value, 1) for value in (statistics.median(s), min(s), max(s)))]
            for name, s in (("prefix unknown", cold), ("prefix known", warm))
        ],
    )
    report.text(f"Ratio of the medians: {statistics.median(cold) / statistics.median(warm):.1f}.")
    report.write()


if __name__ == "__main__":
    main()
