"""Which launches of a step ask for which weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.compute.kernels import launch as launching
from services.compute.layers.prefetch import PrefetchLimits
from services.compute.layers.weighted_layers import Linear
from services.compute.models.decoder import Decoder
from tests.kernels.recorded_step import (
    MAX_TOKENS,
    Quantizing,
    Recorder,
    decoder_of,
    device_of,
    launch,
    run,
)


def asked(recorder: Recorder, decoder: Decoder[Linear]) -> list[tuple[str, str, int]]:
    """Launches, and which weight of the first layer they asked for, and how much of it."""
    layer: Any = decoder.layers[0]
    mixer, mlp = layer.mixer.part, layer.feed_forward.part
    maps = {"qkv": mixer.qkv, "out": mixer.out, "gate_up": mlp.gate_up, "down": mlp.down}
    names = {linear.weight_OI.data_ptr(): name for name, linear in maps.items()}
    return [(name, names[a.address], a.num_bytes) for name, a in recorder.ahead]


def asking(patch: pytest.MonkeyPatch) -> None:
    """As on a device that has the instruction."""
    patch.setattr(launching, "can_prefetch", lambda _: True)


def test_the_launch_before_a_product_asks_for_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    asking(monkeypatch)
    decoder = decoder_of(num_hidden_layers=1)
    recorder = Recorder(takes_norms=False, can_gate=False)
    device = device_of(decoder, recorder, MAX_TOKENS, monkeypatch)
    limited = replace(device, prefetch=PrefetchLimits(out_bytes=512, next_bytes=256))
    launch(decoder, 2, limited, recorder)
    expected = [
        ("norm", "qkv", 256), ("rotate", "out", 512), ("add norm", "gate_up", 256),
        ("silu * up", "down", 256),
    ]  # fmt: skip
    assert asked(recorder, decoder) == expected


def test_a_weight_is_asked_for_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's result is quantized by a launch of its own, after the one that asked."""
    asking(monkeypatch)
    decoder, recorder = decoder_of(num_hidden_layers=1), Quantizing(MAX_TOKENS)
    launch(decoder, 2, device_of(decoder, recorder, MAX_TOKENS, monkeypatch), recorder)
    launches = [(name, weight) for name, weight, _ in asked(recorder, decoder)]
    assert "quantize" in recorder.log
    assert launches == [
        ("norm", "qkv"), ("rotate", "out"), ("add norm", "gate_up"), ("silu * up", "down")
    ]  # fmt: skip


def test_with_more_rows_the_launch_behind_attention_asks_for_the_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking(monkeypatch)
    decoder, recorder = decoder_of(num_hidden_layers=1), Quantizing(16)
    launch(decoder, 16, device_of(decoder, recorder, 16, monkeypatch), recorder)
    assert [name for name, weight, _ in asked(recorder, decoder) if weight == "out"] == ["quantize"]


def test_nothing_is_asked_for_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(takes_norms=False, can_gate=False)
    run(decoder_of(), 2, recorder, monkeypatch)
    assert recorder.ahead == []
