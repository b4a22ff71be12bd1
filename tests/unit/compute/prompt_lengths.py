"""A process that serves prompts of many lengths on the CPU and says how large it is.

Its argument is a folder with a model of 500 words at least.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from services.compute.config import ComputeSettings
from services.compute.runner.registry import load_runner
from tests.unit.compute.hand_scheduler import HandScheduler

GROWN_AFTER = (60, 110)  # prompts
CHUNK = 512


def resident_mb() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


def main() -> None:
    settings = ComputeSettings(
        device="cpu", dtype="bfloat16", num_threads=1, max_batched_token_mem=4096, max_num_seqs=4
    )
    runner = load_runner(Path(sys.argv[1]), settings)
    dice = random.Random(1)
    for number in range(1, GROWN_AFTER[-1] + 1):
        prompt = dice.choices(range(100, 500), k=dice.randint(50, 900))
        steps = HandScheduler(runner, settings.page_tokens)
        sequence = steps.add(prompt)
        for start in range(0, len(prompt), CHUNK):
            steps.step((sequence, min(CHUNK, len(prompt) - start)))
        if number in GROWN_AFTER:
            sys.stdout.write(f"{resident_mb()}\n")


if __name__ == "__main__":
    main()
