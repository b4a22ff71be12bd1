"""Rotation equals that of transformers, for what checkpoints say in their config.json."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from common.errors import ModelError
from services.compute.layers.rope import Rope, RopeSpec, read_rope, rotate
from tests.unit.compute.layers.rope_configs import CASES, RopeCase

CPU = torch.device("cpu")
MODEL_TYPES = {"gemma3": "gemma3_text"}
LENGTHS = [(name, length) for name, case in CASES.items() for length in case.lengths]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def spec_of(case: RopeCase, raw: dict[str, Any] | None = None) -> RopeSpec:
    layer_type = case.layer_type or "full_attention"
    return read_rope(raw or case.raw, case.head_dim, layer_type, case.defaults)


def their_config(case: RopeCase) -> Any:
    # transformers changes what it is given
    raw = {
        name: dict(value) if isinstance(value, dict) else value for name, value in case.raw.items()
    }
    return AutoConfig.for_model(MODEL_TYPES.get(case.family, case.family), **raw)


def their_rotation(case: RopeCase, positions_T: Tensor, q_TND: Tensor) -> Tensor:
    """What transformers' modules make of these queries."""
    name = f"transformers.models.{case.family}.modeling_{case.family}"
    module = importlib.import_module(name)
    (kind,) = (name for name in vars(module) if name.endswith("RotaryEmbedding"))
    embedding = getattr(module, kind)(their_config(case))
    layer_type = (case.layer_type,) if case.layer_type else ()
    cos, sin = embedding(q_TND, positions_T[None], *layer_type)
    rotated, _ = module.apply_rotary_pos_emb(q_TND[None], q_TND[None], cos, sin, unsqueeze_dim=2)
    return rotated[0]


@pytest.mark.parametrize(("name", "length"), LENGTHS)
def test_queries_turn_as_in_transformers(name: str, length: int) -> None:
    case = CASES[name]
    positions_T = torch.tensor([0, 1, 17, length // 2, length - 1])
    q_TND = torch.randn(5, 3, case.head_dim)
    expected = their_rotation(case, positions_T, q_TND)
    spec = spec_of(case)
    order_D = spec.row_order()
    rope = Rope.build(spec.tables(length), 1.0, torch.float32, CPU)
    out = rotate(q_TND[..., order_D], rope.at(positions_T))
    torch.testing.assert_close(out, expected[..., order_D], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_both_generations_of_config_json_say_the_same(name: str) -> None:
    case = CASES[name]
    assert spec_of(case, their_config(case).to_dict()) == spec_of(case)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_longrope_has_other_names_in_the_first_files_of_phi_3(kind: str) -> None:
    case = CASES["phi-3 mini 128k"]
    scaling = {**case.raw["rope_scaling"], "type": kind}
    assert spec_of(case, {**case.raw, "rope_scaling": scaling}) == spec_of(case)


def test_longrope_says_what_it_multiplies_by_in_phi_3_5_moe() -> None:
    case = CASES["phi-3 mini 128k"]
    scaling = {**case.raw["rope_scaling"], "short_mscale": 1.25, "long_mscale": 1.25}
    assert spec_of(case, {**case.raw, "rope_scaling": scaling}).scaling.attention_factor == 1.25


def test_columns_that_do_not_rotate_stay_as_they_are() -> None:
    spec = spec_of(CASES["phi-4 mini"])
    assert spec.scaling.attention_factor > 1.1
    rope = Rope.build(spec.tables(9000), 1.0, torch.float32, CPU)
    x_TND = torch.randn(1, 1, 128)[..., spec.row_order()]
    out_TND = rotate(x_TND.clone(), rope.at(torch.tensor([8999])))
    still = spec.row_order() >= spec.rotary_dim
    assert torch.equal(out_TND[..., still], x_TND[..., still])
    assert bool((out_TND != x_TND)[..., ~still].all())


def test_layers_without_rotation_get_tables_that_change_nothing() -> None:
    spec = RopeSpec(head_dim=8, rotary_dim=0)
    rope = Rope.build(spec.tables(10), 1.0, torch.float32, CPU)
    x_TND = torch.randn(3, 2, 8)
    assert torch.equal(rotate(x_TND.clone(), rope.at(torch.tensor([0, 4, 9]))), x_TND)
    assert torch.equal(spec.row_order(), torch.arange(8))


def test_a_layer_type_without_rotation_is_said_by_null() -> None:
    raw = {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 5e4}}}
    assert read_rope(raw, 8) == RopeSpec(8, 0)
    assert read_rope(raw, 8, "sliding_attention") == RopeSpec(8, 8, 5e4)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (RopeSpec(8, 8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (RopeSpec(8, 4), [0, 1, 4, 5, 2, 3, 6, 7]),
        (RopeSpec(8, 8, interleaved=True), [0, 2, 4, 6, 1, 3, 5, 7]),
        (RopeSpec(8, 4, interleaved=True), [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_rows_of_every_head_get_the_order_of_halves(spec: RopeSpec, rows: list[int]) -> None:
    weight = torch.randn(24, 5)
    heads = spec.in_order(weight).view(3, 8, 5)
    assert torch.equal(heads, weight.view(3, 8, 5)[:, rows])
    bias = torch.randn(24)
    assert torch.equal(spec.in_order(bias).view(3, 8), bias.view(3, 8)[:, rows])
    assert torch.equal(spec.in_order(bias[:8]), bias[:8][rows])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be above 0"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "needs 'short_factor'"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "must have 4 values",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.0, "long_mscale": 1.1}},
            "short_mscale and long_mscale differ",
        ),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        ({"partial_rotary_factor": 1.5}, "rotation of 12 columns of a head of 8"),
        ({"rotary_dim": 2}, "rotation of 2 columns"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_rope({"max_position_embeddings": 64, **changes}, 8)


def test_rope_rotates_each_pair_by_its_angle() -> None:
    spec = RopeSpec(8, 8)
    rope = Rope.build(spec.tables(50), 1.0, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 49])
    out = rotate(x.clone(), rope.at(positions))
    turns = torch.polar(torch.ones(3, 4), positions[:, None] * spec.frequencies(50))[:, None, :]
    expected = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(out, torch.cat((expected.real, expected.imag), -1))
    assert torch.equal(out[0], x[0])


def test_the_scale_of_a_table_multiplies_what_it_rotates() -> None:
    tables = RopeSpec(8, 8).tables(10)
    one, half = (Rope.build(tables, s, torch.float32, torch.device("cpu")) for s in (1.0, 0.5))
    x, positions = torch.randn(2, 1, 8), torch.tensor([3, 9])
    whole, halved = (rotate(x.clone(), rope.at(positions)) for rope in (one, half))
    torch.testing.assert_close(halved, whole * 0.5)
