"""How even do exchanged copies of experts make the work of ranks?

    python -m benchmarks.expert_exchanges

Computed, with layers whose experts have uneven numbers of tokens.
"""

from __future__ import annotations

from random import Random
from statistics import quantiles

from benchmarks.report import Report
from services.compute.distributed import expert_balance as balance

SIZES = (128, 2, 8), (256, 8, 32)  # experts, ranks, copies
NUM_LAYERS, PARETO = 200, 1.2


def busiest(layout: balance.Layout, tokens_X: list[int]) -> float:
    """The work of the busiest rank, in times of the mean."""
    ranks_X = map(len, balance.holders_of(layout, len(tokens_X)))
    share_X = [tokens / ranks for tokens, ranks in zip(tokens_X, ranks_X, strict=True)]
    load = [sum(share_X[expert] for expert in experts) for experts in layout]
    return max(load) * len(load) / sum(load)


def exchanged(seed: int, num_experts: int, ranks: int, copies: int) -> tuple[float, ...]:
    """Of a layer the busiest rank's work at first, exchanges until none gains, the work behind
    them, and with experts that are placed by these counts at the start."""
    rng = Random(seed)
    tokens_X = [int(1000 * rng.paretovariate(PARETO)) for _ in range(num_experts)]
    even, counted = (balance.balanced(by, ranks, copies) for by in ([1] * num_experts, tokens_X))
    layout = balance.layout_of(even, ranks)
    first, num_exchanges = busiest(layout, tokens_X), 0
    while (replacement := balance.better(layout, tokens_X)) is not None:
        layout, num_exchanges = replacement.of(layout), num_exchanges + 1
    placed = busiest(balance.layout_of(counted, ranks), tokens_X)
    return first, num_exchanges, busiest(layout, tokens_X), placed


def main() -> None:
    """Compute, and write the page."""
    report = Report("expert_exchanges", "Exchanged copies of experts", "Target: none.")
    report.text(
        f"{NUM_LAYERS} layers with tokens by Pareto ({PARETO}); the busiest rank's work in times "
        "of the mean. Medians, first and last tenths."
    )
    rows: list[list[object]] = []
    for size in SIZES:
        layers = [exchanged(seed, *size) for seed in range(NUM_LAYERS)]
        tenths = [quantiles(column, n=10) for column in zip(*layers, strict=True)]
        rows.append([*size, *(f"{ten[4]:.3g} ({ten[0]:.3g} to {ten[8]:.3g})" for ten in tenths)])
    columns = ("experts", "ranks", "copies", "at first", "exchanges", "then", "placed at a start")
    report.table(columns, rows)
    report.write()


if __name__ == "__main__":
    main()
