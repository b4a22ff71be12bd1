"""`python -m benchmarks.kernels experts_few`: mixtures of experts at 1, 2 and 4 rows, which may
go one by one.

All launches of a layer by row and by tile, then its products by row with other constants. Results
are compared with float64 first: a line begins with the error in units of the outputs' root mean
square, of which rounding makes 0.01. Weights are cold: a stack is larger than the cache, and calls
take other experts in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from benchmarks.kernels.experts import DTYPE, ROUTINGS, Mixture, Rows, case
from benchmarks.kernels.experts import MIXTURES as ALL_MIXTURES
from benchmarks.kernels.matvec_sweep import compilers
from services.compute.kernels.experts.expert_matmul_config import block_rows, expert_config
from services.compute.kernels.experts.expert_matvec import ExpertRowConfig, expert_row_config

TOKENS = (1, 2, 4)
MIXTURES = [mixture for mixture in ALL_MIXTURES if mixture.kind not in ("int4", "fp4")]
MAX_ERROR = 0.05

CONFIGS = {
    True: [(1, 2048, 2), (1, 2048, 4), (2, 2048, 4), (4, 1024, 4)],
    False: [(1, 256, 1), (2, 256, 2), (4, 256, 2), (4, 256, 4)],
}
"""Outputs, inputs of a step, warps: of gates and ups, and down."""


PARTS = 3
"""Of a mixture's kernels, which processes of their own compile into Triton's cache on disk."""


def cases() -> Iterator[Case]:
    began = time.monotonic()
    with compilers() as pool:
        jobs = [
            pool.submit(_compile, index, part)
            for index in range(len(MIXTURES))
            for part in range(PARTS)
        ]
        for job in jobs:
            job.result()
    print(f"compiled in {time.monotonic() - began:.0f} s")
    for mixture in MIXTURES:
        for num_tokens in TOKENS:
            yield from _of_mixture(mixture, num_tokens)
        for part in ("gate_up", "down", "router"):  # room for the next one's
            mixture.__dict__.pop(part, None)
        torch.cuda.empty_cache()


def _compile(index: int, part: int) -> None:
    mixture = MIXTURES[index]
    rows = Rows(mixture, 1, 16)
    if part == 0:
        gate_config = expert_config(16, mixture.gate_up, DTYPE, gated=True)
        down_config = expert_config(16, mixture.down, DTYPE, gated=False)
        for pdl in (False, True):
            rows.layer(gate_config, down_config, pdl=pdl)
            rows.layer_by_row(pdl=pdl)
    elif part == 1:
        for config in _row_configs(mixture, gated=True):
            rows.gate_up_rows(config)
    else:
        for config in _row_configs(mixture, gated=False):
            rows.down_rows(config)
    torch.cuda.synchronize()


def _row_configs(mixture: Mixture, *, gated: bool) -> list[ExpertRowConfig]:
    """The default first."""
    stack = mixture.gate_up if gated else mixture.down
    found = [expert_row_config(stack, gated=gated)]
    return [*found, *(ExpertRowConfig(*config) for config in CONFIGS[gated])]


def _of_mixture(mixture: Mixture, num_tokens: int) -> Iterator[Case]:
    torch.manual_seed(0)
    block = block_rows(num_tokens * mixture.top_k, mixture.gate_up, DTYPE)
    drawn = [Rows(mixture, num_tokens, block) for _ in range(ROUTINGS)]
    first, gate_up, down = drawn[0], mixture.gate_up, mixture.down
    gate_config = expert_config(block, gate_up, DTYPE, gated=True)
    down_config = expert_config(block, down, DTYPE, gated=False)

    def checked(name: str) -> str:
        """With the error of the layer that has just been run."""
        error = first.layer_error()
        return (
            f"{error:.4f}{' WRONG' * (not error < MAX_ERROR)} {mixture.name} T={num_tokens} {name}"
        )

    for name in ("row", "tile"):
        for pdl in (False, True):
            if name == "row":
                runs = [partial(r.layer_by_row, pdl=pdl) for r in drawn]
            else:
                runs = [partial(r.layer, gate_config, down_config, pdl=pdl) for r in drawn]
            first.out_TE.fill_(torch.nan)
            runs[0]()
            yield case(checked(f"layer by {name}{', pdl' * pdl}"), runs, first, [gate_up, down])
    at = f"       {mixture.name} T={num_tokens}"
    yield case(f"{at} router", [r.route_few for r in drawn], first, [])
    for gated in (True, False):
        stack, product = (gate_up, "gate/up") if gated else (down, "down")
        run = Rows.gate_up_rows if gated else Rows.down_rows
        for number, config in enumerate(_row_configs(mixture, gated=gated)):
            if num_tokens == 2 and number > 0:
                break
            first.layer_by_row(pdl=False)
            first.out_TE.fill_(torch.nan)
            if gated:
                first.inner_RF.fill_(torch.nan)
            run(first, config)
            if gated:
                first.down_rows()
            constants = f"{config.rows},{config.step_inputs},{config.num_warps}"
            name = checked(f"{product} by row {constants}{' now' * (number == 0)}")
            yield case(name, [partial(run, r, config) for r in drawn], first, [stack])
