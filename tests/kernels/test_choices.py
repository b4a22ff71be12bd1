"""Whatever is chosen for a product is valid, and the product is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.kernels.choices import Asked, Choices, Measured, Options
from services.compute.kernels.linear.matvec_config import SHARED_BYTES
from services.compute.kernels.linear.packed_matmul import packed_matmul, packed_options
from services.compute.kernels.linear.quantized_matmul import quantized_matmul
from services.compute.kernels.linear.quantized_matmul_config import quantized_options, row_form
from services.compute.kernels.linear.skinny_matmul import skinny_gate_up, skinny_matmul
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_SPLITS,
    MAX_TOKENS,
    SkinnyWork,
    skinny_gate_up_options,
    skinny_options,
)
from services.compute.kernels.rows.quantized_rows import quantize_rows_reference
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.products import ProductByRows
from services.compute.layers.weighted_layers import KernelLinears, Linear
from services.compute.quantization.packed import Kind, Packed
from services.compute.runner.cuda.choosing import Launch, Measuring
from services.compute.runner.cuda.load import StartLog, choose, machine_sizes, take_known
from services.compute.runner.cuda.meter import GraphMeter
from services.compute.runner.cuda.step_machine import StepMachine
from services.compute.runner.cuda.stream import GraphStream
from services.compute.runner.model_loader import ModelLoader
from tests.kernels.host_stream import HostStream
from tests.kernels.packed_weights import random_packed

WIDTHS = st.sampled_from([64, 576, 896, 1536, 2048, 2560, 4096, 5120, 8192, 14336, 28672])
OUTPUTS = st.integers(16, 300_000)
FORMS: list[tuple[Kind, int, bool, bool]] = [
    ("fp8", 0, False, True),
    ("fp8", 128, False, True),
    ("int8", 0, False, False),
    ("int4", 128, True, False),
]
MOST = 9


def weight_of(form: tuple[Kind, int, bool, bool], num_out: int, num_in: int) -> Packed:
    """Without numbers."""
    kind, group_size, zeros, inputs_8bit = form
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kind, torch.uint8)
    num_bytes, num_groups = num_in // (2 if kind == "int4" else 1), num_in // (group_size or num_in)
    scales = torch.empty(num_out, num_groups, device="meta")
    codes = torch.empty(num_out, num_bytes, dtype=dtype, device="meta")
    return Packed(kind, codes, scales, scales if zeros else None, inputs_8bit=inputs_8bit)


def assert_fit(options: Options[Any], num_tokens: int) -> None:
    """Few, powers of two, and with room for their partial sums."""
    key = options.key
    widest = max(key.num_out, 4096)  # of the model's products: its vocabulary, mostly
    work = SkinnyWork.make(widest, torch.device("meta"))
    assert options.all[0] == options.default and len(options.all) <= MOST
    assert key.num_tokens >= min(num_tokens, 512)
    for config in options.all:
        assert config.block_out.bit_count() == config.num_warps.bit_count() == 1
        assert config.block_out >= 16 and config.num_stages >= 2
        if config.splits > 1:
            blocks = -(-key.num_out // config.block_out)
            size = blocks * config.splits * config.block_out * config.block_tokens
            assert key.num_tokens <= config.block_tokens and config.splits <= MAX_SPLITS
            assert size <= work.partial.numel() and blocks <= work.arrivals.numel()


@given(num_tokens=st.integers(2, MAX_TOKENS), num_out=OUTPUTS, num_in=WIDTHS)
def test_options_of_16_bits_fit_the_multiprocessor_and_the_work(
    num_tokens: int, num_out: int, num_in: int
) -> None:
    for make, tiles in ((skinny_options, 1), (skinny_gate_up_options, 2)):
        options = make(num_tokens, num_out, num_in, torch.bfloat16)
        assert_fit(options, num_tokens)
        for config in options.all:
            assert config.staged_bytes(2, tiles) <= SHARED_BYTES - 1024
            assert tiles == 1 or config.splits == 1


@given(st.sampled_from(FORMS), st.integers(2, 2000), OUTPUTS, WIDTHS)
def test_options_of_codes_fit_the_multiprocessor_and_the_work(
    form: tuple[Kind, int, bool, bool], num_tokens: int, num_out: int, num_in: int
) -> None:
    weight = weight_of(form, num_out, -(-num_in // 128) * 128)
    row_kind = row_form(weight, num_tokens)
    assert row_kind is not None
    options = quantized_options(row_kind, weight, num_tokens)
    assert_fit(options, num_tokens)
    for config in options.all:
        assert config.block_out <= 256 and weight.num_inputs % config.block_in == 0
        is_whole = weight.scales_OG.shape[1] == 1 and not weight.has_halves
        assert config.block_in == 128 or is_whole


@given(st.sampled_from(FORMS), st.integers(2, 128), OUTPUTS, WIDTHS)
def test_options_of_decoded_weights_fit_the_work(
    form: tuple[Kind, int, bool, bool], num_tokens: int, num_out: int, num_in: int
) -> None:
    weight = weight_of(form, num_out, -(-num_in // 128) * 128)
    assert_fit(packed_options(num_tokens, weight, torch.bfloat16), num_tokens)


def assert_alike(outs: list[Tensor], bound: float = 8e-3) -> None:
    for out in outs[1:]:
        assert (out.double() - outs[0].double()).norm() / outs[0].double().norm() < bound
    assert len(outs) > 2


def test_every_option_gives_the_same_product(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 512, device=device, dtype=torch.float16)
    weight = torch.randn(320, 512, device=device, dtype=torch.float16) / 20
    work, outs = SkinnyWork.make(320, device), []
    for config in skinny_options(20, 320, 512, x.dtype).all:
        outs.append(torch.full((20, 320), torch.nan, device=device, dtype=x.dtype))
        skinny_matmul(x, weight, None, outs[-1], work, config)
    assert_alike(outs)
    gated = []
    for config in skinny_gate_up_options(20, 160, 512, x.dtype).all:
        gated.append(torch.full((20, 160), torch.nan, device=device, dtype=x.dtype))
        skinny_gate_up(x, weight, gated[-1], "silu", config)
    assert_alike(gated)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_option_gives_the_same_product_of_packed_weights(
    form: tuple[Kind, int, bool, bool], device: torch.device
) -> None:
    torch.manual_seed(0)
    kind, group_size, zeros, inputs_8bit = form
    made = random_packed(kind, 192, 1024, group_size, zeros, device)
    weight = Packed(kind, made.codes_OB, made.scales_OG, made.zeros_OG, None, inputs_8bit)
    weight = weight.with_adjacent_rows()
    row_kind = row_form(weight, 20)
    assert row_kind is not None
    x = torch.randn(20, 1024, device=device, dtype=torch.float16)
    rows, work = quantize_rows_reference(x, row_kind), SkinnyWork.make(192, device)
    outs, decoded = [], []
    for config in quantized_options(row_kind, weight, 20).all:
        outs.append(torch.full((20, 192), torch.nan, device=device, dtype=x.dtype))
        quantized_matmul(rows, weight, None, outs[-1], work, config)
    for wide in packed_options(20, weight, x.dtype).all:
        decoded.append(torch.full((20, 192), torch.nan, device=device, dtype=x.dtype))
        packed_matmul(x, weight, None, decoded[-1], work, wide)
    assert_alike(outs)
    assert_alike(decoded)


def test_a_product_is_launched_with_what_is_chosen(device: torch.device) -> None:
    choices = Choices()
    product = ProductByRows(SkinnyWork.make(512, device), choices=choices)
    weight = torch.randn(512, 128, device=device, dtype=torch.float16)
    x, out = weight[:20] / 10, torch.zeros(20, 512, device=device, dtype=torch.float16)
    options = skinny_options(20, 512, 128, x.dtype)
    with choices.asking() as asked:
        product(x, Linear(weight), out)
    assert list(asked) == [options.key] and not out.any()
    choices.add({options.key: Measured("no constants", 1.0, 1.0)})
    with pytest.raises(AttributeError, match="'str' object"):
        product(x, Linear(weight), out)


@pytest.mark.gpu
def test_a_meter_finds_what_reads_less_and_passes_over_what_does_not_fit() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    before, stream = torch.cuda.current_stream(), GraphStream(device)
    work = SkinnyWork.make(4096, device)
    weights = [torch.ones(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(4)]
    x, out = weights[0][:16], torch.empty(16, 4096, device=device, dtype=torch.bfloat16)
    options = skinny_options(16, 4096, 4096, x.dtype)
    too_large = replace(options.default, block_in=256, block_out=256, num_stages=9)
    one_program = replace(options.default, splits=1, num_stages=2, num_warps=1)
    asked = Asked(
        replace(options, others=lambda: [too_large, one_program]),
        [partial(skinny_matmul, x, weight, None, out, work) for weight in weights],
    )
    try:
        (choice,) = dict(Measuring(GraphMeter(stream, device)).choices([asked])).values()
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_stream(before)
    assert choice.config == options.default
    assert 5 < choice.us < 500
    assert not work.arrivals.any() and (out == 4096).all()


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def machine_of(
    folder: Path, dtype: str = "float16", **changes: Any
) -> tuple[StepMachine, PagedCache]:
    """Of a tiny model with maps that are large enough, in the interpreter."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    settings = ComputeSettings(
        device="cuda",
        dtype=dtype,
        load_format="dummy",
        page_tokens=8,
        max_num_seqs=16,
        max_prefill_tokens=20,
    )
    loader = ModelLoader.read(folder, settings, torch.device("cpu"))
    decoder = loader.decoder(KernelLinears(loader.dtype, keeps_dense=False))
    machine = StepMachine(decoder, machine_sizes(loader), HostStream(), batch_invariant=False)
    return machine, loader.cache(num_pages=1)


in_the_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stream is the interpreter's"
)


@in_the_interpreter
def test_a_model_says_what_its_products_ask_for(tmp_path: Path) -> None:
    machine, cache = machine_of(tmp_path)
    asked = machine.asked(cache)
    found = {(*each.options.key[:1], *each.options.key[2:]): len(each.launches) for each in asked}
    assert found == {  # other maps are too small for a kernel of their own
        ("skinny_gate_up", 256, 64, 16): 2,
        ("skinny_gate_up", 256, 64, 32): 2,
        ("skinny_matmul", 640, 64, 16): 2,  # the head, at 16 samples after 16 rows and after 32
    }
    for each in asked:
        each.launches[0](each.options.default)


@in_the_interpreter
@torch.inference_mode()
def test_what_experts_are_launched_with_is_measured_on_any_memory(tmp_path: Path) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    sizes = {"num_experts_per_tok": 2, "intermediate_size": 32}
    machine, cache = machine_of(tmp_path, "float32", **mixtral, **sizes)
    asked = {each.options.key.kernel: each for each in machine.asked(cache)}
    for piece in machine._decoder._device.scratch._pieces:
        piece.fill_(63)
    for kernel in ("expert_gate_up", "expert_down"):
        assert len(asked[kernel].launches) == 2 * 2  # layers, at 16 rows and at 32
        for launch in asked[kernel].launches:
            launch(asked[kernel].options.default)


class CountingMeter:
    """Every launch takes as long as it has warps, and fewer stages make it shorter."""

    num_compiled = 0

    def compile(
        self, launches: Sequence[Launch], may_begin: Callable[[], bool], done: Launch
    ) -> list[bool]:
        self.num_compiled += len(launches)
        return [may_begin() for _ in launches]

    def seconds(self, launches: Sequence[Launch]) -> float:
        config = launches[0].args[-1]
        return config.num_warps + config.num_stages / 10


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this device's choices."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Interpreter 1")
    return tmp_path / "cache/slipstream/choices/interpreter-1.jsonl"


@in_the_interpreter
def test_the_next_start_finds_what_one_has_measured(tmp_path: Path, kept: Path) -> None:
    meter = CountingMeter()
    machine, cache = machine_of(tmp_path)
    options = [each.options for each in machine.asked(cache)]
    choose(machine, cache, meter, StartLog(torch.device("cpu")))
    assert meter.num_compiled == sum(len(each.all) for each in options)
    assert len(kept.read_text().splitlines()) == 1 + 3
    assert any(machine.choices.of(each) != each.default for each in options)

    again, cache = machine_of(tmp_path)
    take_known(again, torch.device("cpu"))
    choose(again, cache, meter, StartLog(torch.device("cpu")))
    assert meter.num_compiled == sum(len(each.all) for each in options)  # no more
    assert not again.asked(cache)
    assert [again.choices.of(each) for each in options] == [
        machine.choices.of(each) for each in options
    ]


class EndedMeter(CountingMeter):
    """The start is ended while it measures products of more than 16 rows."""

    def seconds(self, launches: Sequence[Launch]) -> float:
        if launches[0].args[-1].block_tokens > 16:
            raise KeyboardInterrupt
        return super().seconds(launches)


@in_the_interpreter
def test_a_start_that_is_ended_keeps_what_it_has_measured(tmp_path: Path, kept: Path) -> None:
    machine, cache = machine_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        choose(machine, cache, EndedMeter(), StartLog(torch.device("cpu")))
    assert {json.loads(line)["num_tokens"] for line in kept.read_text().splitlines()[1:]} == {16}


@in_the_interpreter
def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, kept: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    machine, cache = machine_of(tmp_path)
    with capture_logs() as logs:
        choose(machine, cache, CountingMeter(), StartLog(torch.device("cpu")))
    events = [line["event"] for line in logs]
    assert events.count("measured choices are not kept") == 1
    assert not machine.asked(cache)
