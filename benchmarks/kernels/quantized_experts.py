"""`python -m benchmarks.kernels quantized_experts`: experts in FP8 times rows in bfloat16, whose
codes are decoded, and times rows in FP8, whose are not.

Both products of Qwen3-30B-A3B by blocks of 128 and by row, evenly routed, with weights that are not
in the cache; each launch alone, a layer's launches from the choice of experts on, and other cuts of
the same products. Launches are compared with float64 first.

Predicted on an H200 in microseconds, gate/up and down: from bytes at 4.5 TB/s 20 and 10 at 4 rows,
57 and 28 at 16, 90 and 45 from 64 on, and at 4,096 from operations at 900 TFLOP/s 230 and 115.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch

from benchmarks.kernels.case import READ_BYTES_PER_S, Case
from benchmarks.kernels.experts import DTYPE, Mixture, Rows, case
from benchmarks.kernels.matvec_sweep import compilers, time_s
from services.compute.kernels.experts.expert_matmul_config import (
    MAX_BLOCK_ROWS,
    ExpertConfig,
    ExpertStack,
    block_rows,
    expert_config,
)
from services.compute.kernels.experts.quantized_expert_config import (
    emits_codes,
    expert_row_form,
    quantized_block_rows,
    quantized_expert_config,
    quantized_expert_options,
)
from services.compute.kernels.experts.quantized_expert_matmul import (
    quantized_down,
    quantized_gate_up,
)
from services.compute.kernels.experts.sort_experts import MIN_BLOCK_ROWS
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm, quantize_rows
from services.compute.quantization.packed import Packed

TOKENS = (4, 16, 64, 256, 284, 1024, 4096)
ROUTINGS = 4
"""Drawn for each number of rows, and taken in turn."""

MAX_ERROR = 0.7
"""In units of the outputs' root mean square, of which the largest is many, and is rounded."""

PARTS = 14
"""Of what there is to compile."""


class Experts(Mixture):
    """Whose inputs may have 8 bits."""

    def _stack(self, num_out: int, num_in: int) -> ExpertStack:
        stack = super()._stack(num_out, num_in)
        assert isinstance(stack.weight, Packed)
        return replace(stack, weight=replace(stack.weight, inputs_8bit=True))


@cache
def mixtures() -> tuple[Experts, ...]:
    return (
        Experts("by 128", 2048, 768, 128, 8, "fp8", 128),
        Experts("by row", 2048, 768, 128, 8, "fp8"),
    )


class CodeRows(Rows):
    """Rows in either form."""

    @cached_property
    def x_codes(self) -> QuantizedRows:
        return self._codes(self.mixture.gate_up, len(self.x_TE))

    @cached_property
    def inner_codes(self) -> QuantizedRows:
        return self._codes(self.mixture.down, len(self.inner_RF))

    def _codes(self, stack: ExpertStack, num_rows: int) -> QuantizedRows:
        return QuantizedRows.empty(row_form_of(stack), num_rows, stack.num_in, self.x_TE.device)

    def quantize_x(self, *, pdl: bool = False) -> None:
        quantize_rows(self.x_TE, self.x_codes, pdl=pdl)

    def quantize_inner(self, *, pdl: bool = False) -> None:
        quantize_rows(self.inner_RF, self.inner_codes, pdl=pdl)

    def gate_up_codes(self, config: ExpertConfig, *, pdl: bool = False) -> None:
        stack = self.mixture.gate_up
        quantized_gate_up(self.x_codes, stack, self.order, self.inner_RF, "silu", config, pdl=pdl)

    def gate_up_to_codes(self, config: ExpertConfig, *, pdl: bool = False) -> None:
        stack, out = self.mixture.gate_up, self.inner_codes
        quantized_gate_up(self.x_codes, stack, self.order, out, "silu", config, pdl=pdl)

    def down_codes(self, config: ExpertConfig, *, pdl: bool = False) -> None:
        quantized_down(
            self.inner_codes, self.mixture.down, self.order, self.rows_RE, config, pdl=pdl
        )

    def layer_of_codes(self, gate_up: Cut, down: Cut) -> None:
        """All launches of a layer, as a step makes them."""
        self.route(pdl=True)
        self.quantize_x(pdl=True)
        self.sort(pdl=True)
        gate_up.run(self, gate_up.config, pdl=True)
        if not gate_up.emits:
            self.quantize_inner(pdl=True)
        down.run(self, down.config, pdl=True)
        self.combine(pdl=True)

    def error(self, cut: Cut) -> float:
        """Of a product of codes, in units of the outputs' root mean square."""
        seen = copy.copy(self)
        if cut.gated:
            cut.run(self, cut.config)
            seen.x_TE = self.x_codes.dense(torch.float32)
            if cut.emits:
                seen.inner_RF = self.inner_codes.dense(torch.float32)
            return seen.gate_up_error()
        self.quantize_inner()
        cut.run(self, cut.config)
        seen.inner_RF = self.inner_codes.dense(torch.float32)
        return seen.down_error()


@dataclass(frozen=True, slots=True)
class Cut:
    """One launch's constants."""

    mixture: int
    quantized: bool
    gated: bool
    config: ExpertConfig
    emits: bool = False  # codes

    @property
    def run(self) -> Callable[..., None]:
        if self.emits:
            return CodeRows.gate_up_to_codes
        if self.quantized:
            return CodeRows.gate_up_codes if self.gated else CodeRows.down_codes
        return CodeRows.gate_up if self.gated else CodeRows.down

    def compile(self) -> None:
        rows = CodeRows(mixtures()[self.mixture], 64, self.config.block_rows)
        self.run(rows, self.config)

    def us(self, drawn: Sequence[CodeRows]) -> float:
        return us(partial(self.run, config=self.config), drawn)

    def line(self, drawn: Sequence[CodeRows]) -> str:
        config = self.config
        name = f"{config.block_rows}x{config.block_out}x{config.block_in}"
        name += f" w{config.num_warps} s{config.num_stages}{' to codes' * self.emits}"
        try:
            error = drawn[0].error(self)
            return f"{name} {self.us(drawn):.1f} ({error:.3f}{' WRONG' * (not error < MAX_ERROR)})"
        except Exception as failure:
            return f"{name} {type(failure).__name__}"


def stack_of(mixture: int, *, gated: bool) -> ExpertStack:
    return mixtures()[mixture].gate_up if gated else mixtures()[mixture].down


def row_form_of(stack: ExpertStack) -> RowForm:
    form = expert_row_form(stack.weight)
    assert form is not None
    return form


def decoded_cut(mixture: int, num_tokens: int, *, gated: bool) -> Cut:
    stack = stack_of(mixture, gated=gated)
    rows = block_rows(8 * num_tokens, stack, DTYPE)
    return Cut(mixture, False, gated, expert_config(rows, stack, DTYPE, gated=gated))


def cuts(mixture: int, num_tokens: int, *, gated: bool) -> list[Cut]:
    """The default, its neighbours, and the defaults of tiles of other sizes."""
    stack = stack_of(mixture, gated=gated)
    rows, form = quantized_block_rows(8 * num_tokens, stack.num_experts), row_form_of(stack)
    found = quantized_expert_options(rows, form, stack, gated=gated).all
    for other in (rows // 2, rows * 2):
        if MIN_BLOCK_ROWS <= other <= MAX_BLOCK_ROWS:
            config = quantized_expert_config(other, stack, gated=gated)
            found += [config, replace(config, num_warps=12 - config.num_warps)]
    return [Cut(mixture, True, gated, config) for config in dict.fromkeys(found)]


def emitting_cuts(mixture: int, num_tokens: int) -> list[Cut]:
    """Of gates and ups, where the launch may end with codes."""
    stack, form = stack_of(mixture, gated=True), row_form_of(stack_of(mixture, gated=False))
    rows = quantized_block_rows(8 * num_tokens, stack.num_experts)
    wide = (ExpertConfig(rows, 128, 128, warps, stages) for warps in (4, 8) for stages in (2, 3, 4))
    return [
        Cut(mixture, True, True, config, emits=True) for config in wide if emits_codes(form, rows)
    ]


def all_cuts() -> list[Cut]:
    found: list[Cut] = []
    for mixture in range(len(mixtures())):
        for num_tokens in TOKENS:
            for gated in (True, False):
                found.append(decoded_cut(mixture, num_tokens, gated=gated))
                found += cuts(mixture, num_tokens, gated=gated)
            found += emitting_cuts(mixture, num_tokens)
    return list(dict.fromkeys(found))


def compile_part(part: int) -> list[str]:
    """In a process of the pool, into Triton's cache on disk; what does not compile."""
    failed = []
    for cut in all_cuts()[part::PARTS]:
        try:
            cut.compile()
        except Exception as error:
            failed.append(f"{cut}: {type(error).__name__} {str(error)[:200]}")
    torch.cuda.synchronize()
    return failed


def us(run: Callable[[CodeRows], object], drawn: Sequence[CodeRows]) -> float:
    return time_s(run, drawn) * 1e6


def drawn_rows(mixture: int, num_tokens: int, block: int) -> list[CodeRows]:
    torch.manual_seed(0)
    return [CodeRows(mixtures()[mixture], num_tokens, block) for _ in range(ROUTINGS)]


def report(mixture: int, num_tokens: int) -> None:
    old_up, old_down = (decoded_cut(mixture, num_tokens, gated=gated) for gated in (True, False))
    up, down = (cuts(mixture, num_tokens, gated=gated) for gated in (True, False))
    drawn = {
        block: drawn_rows(mixture, num_tokens, block)
        for block in {cut.config.block_rows for cut in (old_up, *up, *down)}
    }
    emitting = emitting_cuts(mixture, num_tokens)
    old, new = drawn[old_up.config.block_rows], drawn[up[0].config.block_rows]
    for rows in (rows for each in drawn.values() for rows in each):
        rows.quantize_x()
        rows.gate_up_codes(quantized_default(mixture, rows.order.block_rows))
        rows.quantize_inner()
    stacks = [stack_of(mixture, gated=gated) for gated in (True, False)]
    floors = [case("", [], new[0], [stack]).num_bytes / READ_BYTES_PER_S * 1e6 for stack in stacks]
    old_layer = partial(CodeRows.layer, gate_up=old_up.config, down=old_down.config, pdl=True)
    layers = [partial(CodeRows.layer_of_codes, gate_up=c, down=down[0]) for c in (up[0], *emitting)]
    print(
        f"{mixtures()[mixture].name} T={num_tokens}: bytes {floors[0]:.1f} {floors[1]:.1f}; "
        f"decoded {old_up.us(old):.1f} {old_down.us(old):.1f} layer {us(old_layer, old):.1f}; "
        f"codes {up[0].us(new):.1f} {down[0].us(new):.1f} layer {us(layers[0], new):.1f}; "
        f"quantizing {us(CodeRows.quantize_x, new):.1f} {us(CodeRows.quantize_inner, new):.1f}"
    )
    for layer, cut in zip(layers[1:], emitting, strict=True):
        print(f"    gate/up {cut.line(new)}: layer {us(layer, new):.1f}")
    for name, found in (("gate/up", up), ("down", down)):
        print(f"    {name}:", "; ".join(cut.line(drawn[cut.config.block_rows]) for cut in found))


def quantized_default(mixture: int, block: int) -> ExpertConfig:
    return quantized_expert_config(block, stack_of(mixture, gated=True), gated=True)


def cases() -> Iterator[Case]:
    """None: it prints a table of its own."""
    began = time.monotonic()
    with compilers() as pool:
        failed = [line for part in pool.map(compile_part, range(PARTS)) for line in part]
    print(f"{time.monotonic() - began:.0f} s: compiled")
    print("tiles of rows x outputs x inputs, warps, stages; us; errors of roots of mean squares")
    print("\n".join(failed))
    for num_tokens in TOKENS:
        for mixture in range(len(mixtures())):
            report(mixture, num_tokens)
    print(f"{time.monotonic() - began:.0f} s")
    yield from ()
