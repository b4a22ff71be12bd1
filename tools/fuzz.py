"""`make fuzz`: run the tests that generate their cases with new ones, round after round.

A round is one run of pytest with one seed, and the seed is all that it depends on: `make fuzz
SEED=…` starts with the same round again. It ends after the minutes given, or with the round that
found something, which belongs into the tests as a fixed case.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import subprocess
import sys
import time


def main() -> int:
    """Run rounds until the time is up; 0 if none of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, help="of the first round")
    options, pytest_options = parser.parse_known_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells' background ignores it
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    ends_s = time.monotonic() + 60.0 * options.minutes
    num_rounds = 0
    while (left_s := ends_s - time.monotonic()) > 0:
        print(f"seed {seed}: make fuzz SEED={seed} repeats this round", flush=True)
        status = run_round(seed, left_s, pytest_options)
        if status not in (0, None):
            print(f"round {num_rounds + 1} failed: make fuzz SEED={seed} repeats it")
            return status
        num_rounds += status == 0
        seed += 1
    print(
        f"no round failed in {options.minutes:g} minutes; {num_rounds} were whole, the last was cut"
    )
    return 0


def run_round(seed: int, left_s: float, pytest_options: list[str]) -> int | None:
    """Run all generated cases of a seed; None if the time was up before and nothing had failed."""
    command = [sys.executable, "-m", "pytest", "-q", "--exitfirst", "-m", "hypothesis and not gpu"]
    command += ["--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *pytest_options]
    with subprocess.Popen(command) as running:
        try:
            return running.wait(left_s)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)
            running.wait()  # until its servers have ended
            return None


if __name__ == "__main__":
    sys.exit(main())
