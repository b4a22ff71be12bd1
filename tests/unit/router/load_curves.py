"""Load curves, requests a second every ten seconds, kept in load_curves.json.

`python -m tests.unit.router.load_curves` writes them anew.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

FILE = Path(__file__).with_name("load_curves.json")
INTERVAL_S = 10.0


def curves() -> dict[str, list[float]]:
    """Make the curves: with noise of a tenth, and now and then half as much again for a moment."""
    dice = random.Random(1)

    def noisy(rate: float) -> float:
        spike = 1.5 if dice.random() < 0.02 else 1.0
        return round(max(0.0, dice.gauss(rate, rate / 10) * spike), 2)

    hour = range(360)
    day = range(720)  # of two hours
    return {
        "steps": [noisy((3.0, 6.0, 12.0, 6.0)[at // 90]) for at in hour],
        "ramp": [noisy(2.0 + 26.0 * min(at, 359 - at) / 180) for at in hour],
        "bursts": [noisy(10.0 if at % 90 in range(30, 36) else 4.0) for at in hour],
        "day": [noisy(12.0 - 10.0 * math.cos(2 * math.pi * at / 720)) for at in day],
    }


def recorded() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(FILE.read_text())
    return found


if __name__ == "__main__":
    lines = (f'"{name}": {json.dumps(rates)}' for name, rates in curves().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
