"""Are products cut well for a model's widths? `python -m benchmarks.gpu_tune --models gemma-3-4b`.

For decode steps of so many rows of the whole model with dummy weights, in a captured graph without
unpacking and sampling: the time of the step as it is and with single decisions taken otherwise, by
turns; each launch of a layer with its share of the memory's speed; the best cuts of its linear maps
beside today's; and for one row the step with the best cuts. A minute for one row, with most of it
compiling; 2 to 64 rows have skinny_matmul's cuts instead (`--rows 8,64`, another minute).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.kernels import matvec_sweep, skinny_matmul_sweep
from benchmarks.kernels.case import READ_BYTES_PER_S, replay_s
from benchmarks.kernels.matvec import Model
from services.compute.kernels.attention import decode_attention
from services.compute.kernels.attention.decode_plan import MIN_CHUNK, DecodeTiling, DecodeWork
from services.compute.kernels.attention.prefill_plan import PrefillWork
from services.compute.kernels.choices import Choices
from services.compute.kernels.kv.kv_format import LayerFormat
from services.compute.kernels.linear.matvec import gate_up, matvec, norm_gate_up, norm_matvec
from services.compute.kernels.linear.matvec_config import MatvecConfig
from services.compute.kernels.linear.skinny_matmul_config import MAX_TOKENS, SkinnyWork
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_ROWS,
    NUM_TOKENS,
    Resident,
    StepInputs,
)
from services.compute.layers.kernel_attention import AttentionTables, DecodeAttention
from services.compute.layers.kernel_experts import ExpertProduct
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.parts import Activation
from services.compute.layers.products import ProductByRows
from services.compute.layers.weighted_layers import KernelLinears, Linear
from services.compute.models.families import read_config
from services.compute.models.kernel_decoder import DeviceProducts, KernelDecoder
from services.compute.models.weights import DummyWeights
from services.compute.runner.cuda.device_model import SMALL_WEIGHT_BYTES

NEEDS_GPU = True

CONTEXT = 420  # the mean of the workloads
PAGE_TOKENS = 16
MAX_POSITIONS = 4096
ROUNDS = 3
MAPS = ("o", "gate/up", "down", "qkv")  # in the order of launches after a rotation

Cuts = Mapping[tuple[str, int, int], MatvecConfig]
"""By kind of product, outputs (of gates and ups together) and inputs."""


@dataclass(frozen=True, slots=True)
class TunedProduct(ProductByRows):
    """With cuts of one row as told, and perhaps with every norm in its launch."""

    cuts: Cuts = field(default_factory=dict)
    takes_norms: bool = False

    def __call__(self, x_TI: Tensor, linear: Linear, out_TO: Tensor) -> None:
        if x_TI.shape[0] == 1:
            config = self._cut("plain", linear)
            weight_OI, pdl = linear.weight_OI, self.row_pdl
            matvec(x_TI, weight_OI, linear.bias_O, out_TO, config=config, pdl=pdl)
        else:
            ProductByRows.__call__(self, x_TI, linear, out_TO)

    def can_norm(self, num_tokens: int, linear: Linear, norms_behind: bool) -> bool:
        return num_tokens == 1 and (self.takes_norms or not norms_behind)

    def gated(self, x_TI: Tensor, linear: Linear, activation: Activation, out_TF: Tensor) -> None:
        if x_TI.shape[0] == 1:
            config, weight_OI = self._cut("gated", linear), linear.weight_OI
            gate_up(x_TI, weight_OI, out_TF, activation, config=config, pdl=self.row_pdl)
        else:
            ProductByRows.gated(self, x_TI, linear, activation, out_TF)

    def normed(self, normed: NormedInput, linear: Linear, out_TO: Tensor) -> None:
        config, weight_OI = self._cut("norm", linear), linear.weight_OI
        norm_matvec(normed, weight_OI, linear.bias_O, out_TO, config=config, pdl=self.row_pdl)

    def normed_gated(
        self, normed: NormedInput, linear: Linear, activation: Activation, out_TF: Tensor
    ) -> None:
        config, weight_OI = self._cut("norm gated", linear), linear.weight_OI
        norm_gate_up(normed, weight_OI, out_TF, activation, config=config, pdl=self.row_pdl)

    def _cut(self, kind: str, linear: Linear) -> MatvecConfig | None:
        return self.cuts.get((kind, *linear.weight_OI.shape))


@dataclass(frozen=True, slots=True)
class Variant:
    """What is decided otherwise; None: as the server does."""

    name: str
    takes_norms: bool = False
    row_pdl: bool | None = None
    pdl: bool = True
    early: bool = True
    cuts: Cuts = field(default_factory=dict)
    min_chunk: int = MIN_CHUNK  # of decode attention
    tiling: DecodeTiling | None = None


class Bench:
    """A model with dummy weights, rows at a context, and graphs of its step."""

    def __init__(self, name: str, max_rows: int, device: torch.device) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = make_folder(Path(folder) / "model", SHAPES[name])
            config = read_config(json.loads((path / "config.json").read_text()))
        self.device = device
        self._kept: list[Callable[[], None]] = []
        self.shape, self.name = config.shape, name
        weights = DummyWeights(torch.bfloat16, device)
        self.decoder = config.build(weights, KernelLinears(torch.bfloat16, keeps_dense=False))
        model = self.shape
        form = LayerFormat(
            model.num_kv_heads, PAGE_TOKENS, model.head_dim, torch.bfloat16, torch.bfloat16
        )
        formats = {mixer.span: form for mixer in self.decoder.mixers}
        self.layout = CacheLayout.of(
            [mixer.span for mixer in self.decoder.mixers],
            dict.fromkeys(formats, form.num_bytes),
        )
        num_groups = len(self.layout.spans)
        pages = -(-(CONTEXT + 1) // PAGE_TOKENS)
        num_pages = num_groups * max_rows * pages
        self.cache = PagedCache(self.layout, formats, (num_pages, 0), device)
        self.cache.device_pages.view(torch.bfloat16).normal_()
        self.inputs = StepInputs.make(max_rows, max_rows, device, num_groups)
        max_pages = MAX_POSITIONS // PAGE_TOKENS
        self.tables = Resident.make(max_rows, max_pages, 1, device, num_groups).page_table
        generator = torch.Generator(device).manual_seed(0)
        ids = torch.randperm(num_pages, generator=generator, device=device, dtype=torch.int32)
        self.tables[:, :, :pages] = ids.view(num_groups, max_rows, pages)
        self.work = SkinnyWork.make(
            max(self.shape.vocab_size, 2 * self.shape.intermediate_size), device
        )

    @property
    def norms_behind(self) -> bool:
        return self.decoder.layers[-1].last[0] is not None

    @property
    def model(self) -> Model:
        """Its widths, for the sweeps."""
        shape = self.shape
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        return Model(
            self.name, shape.hidden_size, qkv, shape.intermediate_size, shape.vocab_size,
            shape.num_heads * shape.head_dim, self.norms_behind,
        )  # fmt: skip

    @property
    def layer_bytes(self) -> dict[str, float]:
        m = self.model
        outputs_inputs = (m.width * m.mixed, 2 * m.inner * m.width, m.width * m.inner)
        return dict(zip(MAPS, (2.0 * n for n in (*outputs_inputs, m.qkv * m.width)), strict=True))

    @property
    def head_bytes(self) -> float:
        return 2.0 * self.shape.vocab_size * self.shape.hidden_size

    @property
    def floor_s(self) -> float:
        """The time that the weights alone take."""
        layers = self.shape.num_layers * sum(self.layer_bytes.values())
        return (layers + self.head_bytes) / READ_BYTES_PER_S

    def fill(self, num_rows: int) -> None:
        """Rows of one token each, at the context."""
        inputs, rows = self.inputs, torch.arange(num_rows, device=self.device, dtype=torch.int32)
        for place in (NUM_ROWS, NUM_DECODE_ROWS, NUM_TOKENS):
            inputs.counts[place] = num_rows
        inputs.tokens_T[:num_rows] = rows + 7
        inputs.positions_T.fill_(CONTEXT)
        inputs.q_start_R.fill_(CONTEXT)
        inputs.q_len_R.fill_(1)
        for of_rows in (inputs.row_slot_R, inputs.token_start_R, inputs.sample_token_S):
            of_rows[:num_rows] = rows
        page, offset = divmod(CONTEXT, PAGE_TOKENS)
        slots_GR = self.tables[:, :num_rows, page].long() * PAGE_TOKENS + offset
        inputs.kv_slots_GT[:, :num_rows] = slots_GR
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # graphs are captured on a stream of their own

    def step(self, variant: Variant, num_rows: int) -> Callable[[], object]:
        """Launches the forward pass and the logits."""
        inputs, shape = self.inputs, self.shape
        group = shape.num_heads // shape.num_kv_heads
        max_rows = len(inputs.row_slot_R)
        work = DecodeWork.make(
            max_rows, shape.num_kv_heads, group, shape.head_dim, device=self.device,
            min_chunk=variant.min_chunk, tiling=variant.tiling,
        )  # fmt: skip
        plans = {span: work.for_span(span) for span in set(self.layout.spans)}
        prefill = PrefillWork.make(max_rows, max_rows, group, self.device)
        tables = AttentionTables(inputs, plans, prefill, PAGE_TOKENS, variant.pdl)
        row_pdl, takes_norms = variant.row_pdl, variant.takes_norms
        if row_pdl is None:
            num_bytes = 2 * shape.hidden_size * shape.intermediate_size
            row_pdl = variant.pdl and num_bytes <= SMALL_WEIGHT_BYTES
        product = TunedProduct(
            self.work, variant.pdl, row_pdl, cuts=variant.cuts, takes_norms=takes_norms
        )
        experts = ExpertProduct(product, Choices(), inputs.counts, invariant=False, pdl=variant.pdl)
        multiply = DeviceProducts({Linear: product}, experts, variant.pdl)
        decoder = KernelDecoder(self.decoder, inputs, multiply, MAX_POSITIONS)
        caches = [
            LayerCache(
                self.cache.layer_pages(layer),
                self.tables[place.group],
                inputs.kv_slots_GT[place.group],
            )
            for layer, place in enumerate(self.layout.places)
        ]

        def launch() -> None:
            decoder.forward(num_rows, caches, DecodeAttention(tables))
            decoder.logits_at(inputs.sample_token_S[:num_rows])

        return launch

    def graph(self, variant: Variant, num_rows: int) -> torch.cuda.CUDAGraph:
        self.fill(num_rows)
        launch = self.step(variant, num_rows)
        with _early(variant.early), torch.inference_mode():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                launch()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                launch()
        self._kept.append(launch)  # a graph does not own the memory that it reads
        return graph


@contextmanager
def _early(early: bool) -> Iterator[None]:
    before = decode_attention.EARLY_WIDTH
    decode_attention.EARLY_WIDTH = before if early else 1 << 30
    yield
    decode_attention.EARLY_WIDTH = before


def compare(bench: Bench, variants: list[Variant], num_rows: int) -> None:
    """Print each variant's step, all rounds, taken by turns."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for variant in variants:
        try:
            graphs[variant.name] = bench.graph(variant, num_rows)
        except Exception as error:  # a cut that does not fit: the others are still of use
            print(f"  {variant.name}: {type(error).__name__}: {str(error)[:200]}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(1e3 * replay_s(graph))
    for name, rounds in times.items():
        share = bench.floor_s * 1e3 / min(rounds)
        shown = ", ".join(f"{ms:.3f}" for ms in rounds)
        print(f"  {name:<58} {shown} ms   {share:4.0%} of the memory's speed", flush=True)


def launches(bench: Bench, num_rows: int) -> None:
    """Print the launches of a layer in order, the mean of all layers, and of what is around."""
    graph = bench.graph(Variant("", pdl=False, row_pdl=False), num_rows)
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_time > 0]
    events.sort(key=lambda event: event.time_range.start)
    found = [(event.name, event.device_time) for event in events]
    turns = [n for n, (name, _) in enumerate(found) if "rotate" in name]
    layers = [found[a:b] for a, b in zip(turns, turns[1:], strict=False)]
    total = sum(us for _, us in found)
    print(f"  kernels one after the other: {total / 1e3:.3f} ms in {len(found)} launches; a layer:")
    for position, (name, _) in enumerate(layers[0] if layers else []):
        us = statistics.mean(layer[position][1] for layer in layers if len(layer) > position)
        before = [n for n, _ in layers[0][:position]]
        _print_launch(name, us, _map_of(bench, name, before))
    print("  before the first rotation and after the last:")
    for name, us in found[: turns[0]] if turns else found:
        _print_launch(name, us, None)
    for name, us in found[turns[-1] :] if turns else []:
        _print_launch(name, us, ("head", bench.head_bytes) if us > 100 else None)


def _map_of(bench: Bench, name: str, before: list[str]) -> tuple[str, float] | None:
    if not _is_product(name):
        return None
    number = sum(map(_is_product, before))
    label = MAPS[min(number, len(MAPS) - 1)]
    return label, bench.layer_bytes[label]


def _is_product(name: str) -> bool:
    return any(part in name for part in ("matvec", "skinny", "gemm", "nvjet", "cutlass"))


def _print_launch(name: str, us: float, found: tuple[str, float] | None) -> None:
    label, share = "", ""
    if found is not None:
        label, num_bytes = found
        floor_us = num_bytes / READ_BYTES_PER_S * 1e6
        share = f"of {floor_us:6.1f}: {floor_us / us:4.0%}"
    print(f"    {us:8.2f} µs {share:<16} {label:<8} {name[:70]}", flush=True)


def tune_row(bench: Bench) -> None:
    """One row: decisions one by one, cuts, and the step with the best."""
    now = Variant("as the server does")
    variants = [
        now,
        Variant("both norms in the products' launches", takes_norms=True),
        Variant("the same, products not dependent launches", takes_norms=True, row_pdl=False),
        Variant("attention lets the next kernel start at its end", early=False),
        Variant("products not dependent launches", row_pdl=False),
        Variant("products dependent launches", row_pdl=True),
        Variant("no dependent launches at all", pdl=False, row_pdl=False, early=False),
        Variant("attention in chunks of 32", min_chunk=32),
        Variant("attention in chunks of 128", min_chunk=128),
        Variant("attention in tiles of 32, four warps", tiling=DecodeTiling(32, 4)),
        Variant("attention in tiles of 16, four stages", tiling=DecodeTiling(16, 2, 4)),
    ]
    compare(bench, variants, 1)
    launches(bench, 1)
    with matvec_sweep.compilers() as pool:
        fastest = matvec_sweep.sweep(pool, [bench.model])
    cuts = {(m.kind, m.num_out, m.num_in): config for m, config in fastest.items()}
    print("the step with the fastest cuts:")
    for key, config in cuts.items():
        print(f"  {key}: {config}")
    best = [
        now,
        Variant("the fastest cuts", cuts=cuts),
        Variant("the fastest cuts, products not dependent launches", cuts=cuts, row_pdl=False),
        Variant("the fastest cuts, both norms in the products", cuts=cuts, takes_norms=True),
    ]
    for key, config in cuts.items():
        if not (bench.norms_behind and key[0].startswith("norm")):
            best.append(Variant(f"of these {key} alone", cuts={key: config}))
    compare(bench, best, 1)


def main() -> None:
    """Every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gemma-3-4b")
    parser.add_argument("--rows", default="1")
    options = parser.parse_args()
    rows = [int(number) for number in options.rows.split(",")]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    began_s = time.monotonic()
    for name in options.models.split(","):
        bench = Bench(name, max(rows), torch.device("cuda"))
        print(f"\n== {name}: the weights alone take {bench.floor_s * 1e3:.3f} ms", flush=True)
        for number in rows:
            print(f"{number} rows at context {CONTEXT} ({time.monotonic() - began_s:.0f} s):")
            if number == 1:
                tune_row(bench)
            else:
                compare(bench, [Variant("as the server does")], number)
                launches(bench, number)
        tiles = sorted({max(16, 1 << (n - 1).bit_length()) for n in rows if 1 < n <= MAX_TOKENS})
        if tiles:
            with matvec_sweep.compilers() as pool:
                skinny_matmul_sweep.sweep(pool, [bench.model], tiles)
        print(f"done after {time.monotonic() - began_s:.0f} s")
        del bench
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
