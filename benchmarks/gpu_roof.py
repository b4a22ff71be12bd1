"""The most that an H200 allows of a workload: `python -m benchmarks.gpu_roof`.

A timeline of the same requests in which a step takes what its products need, at the speed of the
memory or of arithmetic, and what reading its keys and values needs; nothing else takes time: no
launches, no host, no network.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_models import SHAPES, Shape
from services.bench.workloads import WORKLOADS, BenchRequest, requests_of

READ_BYTES_PER_S = 4.3e12  # as a large copy moves them; a kernel that only reads reaches 4.5
FLOPS_PER_S = 650e12  # bf16 products of these shapes reach 600 to 670
STEP_TOKENS = 8192


@dataclass(slots=True)
class _Open:
    """A request, how much of it is in the cache and how many tokens it still has to get."""

    prompt_tokens: int
    cached: int
    left: int


@dataclass(frozen=True, slots=True)
class Roof:
    """What one step of a shape needs at least."""

    body_params: int  # of all layers
    head_params: int
    kv_bytes: int  # of a token in all layers without a window
    window_bytes: int  # of a token in those with one
    window: int

    @staticmethod
    def of(shape: Shape) -> Roof:
        heads = shape.num_heads + shape.num_kv_heads
        layer = 2 * shape.hidden_size * heads * shape.head_dim
        layer += 3 * shape.hidden_size * shape.intermediate_size
        token_bytes = 4 * shape.num_kv_heads * shape.head_dim
        window = shape.fields.get("sliding_window") or 0
        pattern = shape.fields.get("sliding_window_pattern", 1)
        num_windowed = shape.num_layers - shape.num_layers // pattern if window else 0
        return Roof(
            body_params=shape.num_layers * layer,
            head_params=shape.vocab_size * shape.hidden_size,
            kv_bytes=(shape.num_layers - num_windowed) * token_bytes,
            window_bytes=num_windowed * token_bytes,
            window=window,
        )

    def step_s(self, num_tokens: int, lengths: Sequence[int]) -> float:
        """Seconds of a step of so many tokens, of which `lengths` are sampled after so many."""
        weight_bytes = 2 * (self.body_params + self.head_params)
        flops = 2 * (self.body_params * num_tokens + self.head_params * len(lengths))
        kept = self.kv_bytes * sum(lengths)
        kept += self.window_bytes * sum(min(length, self.window) for length in lengths)
        products_s = max(weight_bytes / READ_BYTES_PER_S, flops / FLOPS_PER_S)
        return products_s + kept / READ_BYTES_PER_S

    def tokens_per_s(self, requests: Sequence[BenchRequest], concurrency: int) -> float:
        """Play the requests, so many at once, decode rows before prompt chunks."""
        waiting = deque(_Open(len(r.prompt_ids), 0, r.max_tokens) for r in requests)
        running: list[_Open] = []
        time_s, num_outputs = 0.0, sum(request.left for request in waiting)
        while waiting or running:
            while waiting and len(running) < concurrency:
                running.append(waiting.popleft())
            budget, num_tokens, sampled = STEP_TOKENS, 0, []
            for each in sorted(running, key=lambda one: one.cached < one.prompt_tokens):
                count = min(max(each.prompt_tokens - each.cached, 1), budget)
                each.cached += count
                budget -= count
                num_tokens += count
                if count and each.cached >= each.prompt_tokens:
                    each.left -= 1
                    sampled.append(each.cached)
            time_s += self.step_s(num_tokens, sampled)
            running = [each for each in running if each.left]
        return num_outputs / time_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(SHAPES))
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        roof = Roof.of(SHAPES[name])
        for workload in ("A", "B", "C"):
            chosen = WORKLOADS[workload]
            rate = roof.tokens_per_s(requests_of(chosen, seed=1), chosen.concurrency)
            print(f"{name} {workload}: {rate:,.0f} tokens/s")


if __name__ == "__main__":
    main()
