"""What a checkpoint's tensors become: maps and norms in the form in which layers use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.decoder_shape import DecoderShape
from common.errors import ModelError
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.parts import Layer, SerialLayer, Sublayer
from services.compute.layers.rope import Rope, RopeDefaults, RopeSpec, rotate
from services.compute.layers.weighted_layers import KernelLinears, Linear
from services.compute.models.builder import Builder, NormForm, TopNames
from services.compute.models.decoder import Decoder
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.models.weights import CheckpointWeights
from tests.spans import spans_of

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, HIDDEN, INNER, VOCAB, LAYERS = 6, 2, 12, 20, 28, 30, 3
Q, KV = HEADS * WIDTH, KV_HEADS * WIDTH
SHAPE = DecoderShape(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=WIDTH,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
RMS = NormForm(1e-5)
Tensors: TypeAlias = "dict[str, Tensor]"
Make: TypeAlias = "Callable[..., Builder[Linear]]"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a builder for these tensors."""

    def build(
        tensors: Tensors,
        shape: DecoderShape = SHAPE,
        windows: tuple[int, ...] = (0,) * LAYERS,
        dtype: torch.dtype = torch.float32,
        **raw: Any,
    ) -> Builder[Linear]:
        save_file(tensors, tmp_path / "model.safetensors")
        return Builder(
            shape,
            raw,
            spans_of(windows),
            CheckpointWeights(SafetensorsFiles(tmp_path, CPU), dtype, CPU),
            KernelLinears(torch.float32, keeps_dense=False),
        )

    return build


def draw(**shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in named.items()}


def projections() -> Tensors:
    return draw(
        q__weight=(Q, HIDDEN), k__weight=(KV, HIDDEN), v__weight=(KV, HIDDEN),
        q__bias=(Q,), k__bias=(KV,), v__bias=(KV,),
    )  # fmt: skip


def merged(tensors: Tensors) -> Tensors:
    return {
        f"qkv.{kind}": torch.cat([tensors[f"{name}.{kind}"] for name in "qkv"])
        for kind in ("weight", "bias")
    }


def by_kv_head(tensors: Tensors) -> Tensors:
    """One tensor with the queries of each kv head, its key and its value."""
    group = HEADS // KV_HEADS
    out = {}
    for kind in ("weight", "bias"):
        q, k, v = (tensors[f"{name}.{kind}"].unflatten(0, (-1, WIDTH)) for name in "qkv")
        heads = [
            part
            for head in range(KV_HEADS)
            for part in (*q[head * group : (head + 1) * group], k[head], v[head])
        ]
        out[f"qkv.{kind}"] = torch.cat(heads)
    return out


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_are_one_map_however_they_are_stored(
    make: Make, bias: bool
) -> None:
    apart = projections()
    expected = merged(apart)
    three = make(apart).qkv(["q", "k", "v"], None, bias)
    one = make(merged(apart)).qkv(["qkv"], None, bias)
    grouped = make(by_kv_head(apart)).qkv(["qkv"], None, bias, by_kv_head=True)
    for linear in (three, one, grouped):
        assert torch.equal(linear.weight_OI, expected["qkv.weight"])
        assert (linear.bias_O is not None) is bias
        assert linear.bias_O is None or torch.equal(linear.bias_O, expected["qkv.bias"])


def turned(x_ND: Tensor, position: int, rope: RopeSpec) -> Tensor:
    """Heads as the checkpoint has them, rotated pair by pair as its family does."""
    out = x_ND.clone()
    half = rope.rotary_dim // 2
    for pair, frequency in enumerate(rope.theta ** (-torch.arange(half) / half)):
        i, j = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
        cos, sin = torch.cos(position * frequency), torch.sin(position * frequency)
        out[:, i] = x_ND[:, i] * cos - x_ND[:, j] * sin
        out[:, j] = x_ND[:, j] * cos + x_ND[:, i] * sin
    return out


ROPES = [
    RopeSpec(WIDTH, rotary_dim, theta=100.0, interleaved=interleaved)
    for rotary_dim in (WIDTH, WIDTH // 2)
    for interleaved in (False, True)
]
STORED: dict[str, Callable[[Tensors], Tensors]] = {
    "apart": lambda tensors: tensors,
    "merged": merged,
    "by kv head": by_kv_head,
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rows_are_ordered_so_that_halves_of_whole_heads_rotate(
    make: Make, rope: RopeSpec, stored: str
) -> None:
    """Scores are the family's, and so are values."""
    apart = projections()
    names = ["q", "k", "v"] if stored == "apart" else ["qkv"]
    linear = make(STORED[stored](apart)).qkv(names, rope, True, by_kv_head=stored == "by kv head")
    x_TE = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([5, 17])
    q, k, v = linear(x_TE).unflatten(1, (-1, WIDTH)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    rows = Rope.build(rope.tables(20), 1.0, torch.float32, CPU).at(positions)
    q, k = rotate(q, rows), rotate(k, rows)
    theirs = {
        name: torch.nn.functional.linear(
            x_TE, apart[f"{name}.weight"], apart[f"{name}.bias"]
        ).unflatten(1, (-1, WIDTH))
        for name in "qkv"
    }
    for token, position in enumerate(positions.tolist()):
        theirs["q"][token] = turned(theirs["q"][token], position, rope)
        theirs["k"][token] = turned(theirs["k"][token], position, rope)
    torch.testing.assert_close(
        torch.einsum("thd,ukd->thuk", q, k), torch.einsum("thd,ukd->thuk", theirs["q"], theirs["k"])
    )
    assert torch.equal(v, theirs["v"])


@pytest.mark.parametrize("shape", [(), (KV,), (KV_HEADS, WIDTH)], ids=str)
@pytest.mark.parametrize("rope", [None, *ROPES], ids=str)
def test_a_norm_of_heads_follows_the_order_of_their_rows(
    make: Make, rope: RopeSpec | None, shape: tuple[int, ...]
) -> None:
    """Of one head for all, of all heads together, and a weight for each head."""
    tensors = draw(k_norm__weight=shape or (WIDTH,))
    norm = make(tensors).head_norm("k_norm", RMS, rope, *shape)
    weight = tensors["k_norm.weight"].flatten()
    k = draw(k=(4, len(weight)))["k"]

    def ordered(x: Tensor) -> Tensor:
        return x if rope is None else rope.in_order(x.T).T

    expected = torch.nn.functional.rms_norm(k, k.shape[1:], weight, RMS.eps)
    torch.testing.assert_close(norm(ordered(k)), ordered(expected))


def test_gates_and_ups_are_one_map_however_they_are_stored(make: Make) -> None:
    apart = draw(
        m__gate_proj__weight=(INNER, HIDDEN), m__gate_proj__bias=(INNER,),
        m__up_proj__weight=(INNER, HIDDEN), m__up_proj__bias=(INNER,),
        m__down_proj__weight=(HIDDEN, INNER), m__down_proj__bias=(HIDDEN,),
    )  # fmt: skip
    together = {name: value for name, value in apart.items() if "down" in name}
    for kind in ("weight", "bias"):
        parts = [apart[f"m.{name}_proj.{kind}"] for name in ("gate", "up")]
        together[f"m.gate_up_proj.{kind}"] = torch.cat(parts)
    for tensors, is_merged in ((apart, False), (together, True)):
        mlp = make(tensors).gated_mlp("m", bias=True, activation="gelu", merged=is_merged)
        assert mlp.activation == "gelu"
        assert torch.equal(mlp.gate_up.weight_OI, together["m.gate_up_proj.weight"])
        assert torch.equal(mlp.gate_up.bias_O, together["m.gate_up_proj.bias"])
        assert torch.equal(mlp.down.weight_OI, apart["m.down_proj.weight"])
        assert torch.equal(mlp.down.bias_O, apart["m.down_proj.bias"])


def test_a_weight_that_is_stored_less_one_is_not_rounded_again(make: Make) -> None:
    """In bfloat16 1 + 2^-9 would be 1."""
    tensors = {"norm.weight": torch.full((HIDDEN,), 2.0**-9)}
    form = NormForm(1e-6, plus_one=True, round_first=False)
    norm = make(tensors, dtype=torch.bfloat16).norm("norm", form)
    assert norm.weight_E.dtype == torch.float32
    assert torch.equal(norm.weight_E, torch.full((HIDDEN,), 1 + 2.0**-9))
    assert (norm.kind, norm.eps, norm.bias_E, norm.round_first) == ("rms", 1e-6, None, False)


def test_a_norm_may_have_a_bias(make: Make) -> None:
    tensors = draw(norm__weight=(HIDDEN,), norm__bias=(HIDDEN,))
    norm = make(tensors).norm("norm", NormForm(1e-5, "layer", has_bias=True))
    x = draw(x=(3, HIDDEN))["x"]
    weight, bias = tensors["norm.weight"], tensors["norm.bias"]
    expected = torch.nn.functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-5)
    torch.testing.assert_close(norm(x), expected)


SMALL = replace(SHAPE, num_layers=2)
NAMES = TopNames(embedding="embed", layers="blocks", norm="last", head="output")


def whole() -> Tensors:
    """All tensors of a model of two layers."""
    shapes = {"embed": (VOCAB, HIDDEN), "last": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    layer = {"n1": (HIDDEN,), "n2": (HIDDEN,), "o": (HIDDEN, Q), "up": (INNER, HIDDEN)}
    layer |= {"q": (Q, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "down": (HIDDEN, INNER)}
    for number in range(2):
        shapes |= {f"blocks__{number}__{name}": shape for name, shape in layer.items()}
    return draw(**{f"{name}__weight": shape for name, shape in shapes.items()})


def build(make: Builder[Linear], **more: Any) -> Decoder[Linear]:
    rope = make.rope()

    def layer(at: str) -> Layer[Linear]:
        qkv = make.qkv([f"{at}.{name}" for name in "qkv"], rope, False)
        return SerialLayer(
            Sublayer(make.norm(f"{at}.n1", RMS), make.mixer(qkv, make.out(f"{at}.o"), rope)),
            Sublayer(
                make.norm(f"{at}.n2", RMS), make.mlp(f"{at}.up", f"{at}.down", False, "relu2")
            ),
        )

    return make.decoder(layer, RMS, NAMES, **more)


def test_a_decoder_has_the_tensors_of_its_layers_in_order(make: Make) -> None:
    tensors = whole()
    decoder = build(
        make(tensors, SMALL, windows=(0, 8)),
        embedding_scale=3.0,
        logit_scale=0.5,
        logit_softcap=30.0,
    )
    assert torch.equal(decoder.embedding.weight_VE, tensors["embed.weight"])
    assert torch.equal(decoder.head.weight_OI, tensors["output.weight"])
    assert torch.equal(decoder.norm.weight_E, tensors["last.weight"])
    for number, mixer in enumerate(decoder.mixers):
        assert torch.equal(mixer.out.weight_OI, tensors[f"blocks.{number}.o.weight"])
        layer = decoder.layers[number]
        assert isinstance(layer, SerialLayer) and layer.mixer.part is mixer
    assert [mixer.layer for mixer in decoder.mixers] == [0, 1]
    assert [mixer.span for mixer in decoder.mixers] == [*spans_of((0, 8))]
    assert [mixer.scale for mixer in decoder.mixers] == [WIDTH**-0.5] * 2
    assert (decoder.embedding.scale, decoder.logit_scale, decoder.logit_softcap) == (3.0, 0.5, 30.0)
    assert decoder.has_head


def test_a_builder_knows_the_layer_that_is_being_made(make: Make) -> None:
    builder = make(whole(), windows=(0, 8, 0))
    linear = Linear(torch.empty(0))
    seen = []
    for _ in range(LAYERS):
        seen.append((builder.layer_number, builder.span, builder.layer_type))
        builder.mixer(linear, linear, None)
    assert seen == [
        (0, FULL, "full_attention"),
        (1, AttentionSpan.window(8), "sliding_attention"),
        (2, FULL, "full_attention"),
    ]


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_tied_head_is_the_embedding_whether_it_was_saved_or_not(
    make: Make, is_saved: bool
) -> None:
    tensors = whole()
    if not is_saved:
        del tensors["output.weight"]
    for needs_head in (False, True):
        builder = make(tensors, replace(SMALL, tie_word_embeddings=True))
        builder.needs_head = needs_head
        decoder = build(builder)
        assert decoder.has_head
        assert torch.equal(decoder.head.weight_OI, tensors["embed.weight"])


def test_a_missing_head_is_an_error_only_where_text_is_to_be_made(make: Make) -> None:
    tensors = whole()
    del tensors["output.weight"]
    with pytest.raises(ModelError, match=r"output\.weight is missing"):
        build(make(tensors, SMALL))
    builder = make(tensors, SMALL)
    builder.needs_head = False
    assert not build(builder).has_head
    builder = make(whole(), SMALL)
    builder.needs_head = False
    assert build(builder).has_head


@pytest.mark.parametrize("name", ["blocks.1.q.bias", "blocks.2.q.weight", "surprise"])
def test_tensors_that_are_left_over_are_an_error(make: Make, name: str) -> None:
    with pytest.raises(ModelError, match=f"1 tensors do not belong .*{name}"):
        build(make(whole() | {name: torch.ones(2)}, SMALL))


def test_parts_that_a_family_leaves_out_on_purpose_may_be_there(make: Make) -> None:
    more = {"tower.0.weight": torch.zeros(2), "tower.1.weight": torch.zeros(2)}
    builder = make(whole() | more, SMALL)
    builder.skip("tower.")
    build(builder)


@pytest.mark.parametrize("name", ["blocks.1.k.weight", "blocks.0.n2.weight", "last.weight"])
def test_a_missing_tensor_and_one_of_another_shape_are_named(make: Make, name: str) -> None:
    tensors = whole()
    less = {other: value for other, value in tensors.items() if other != name}
    with pytest.raises(ModelError, match=f"{name} is missing"):
        build(make(less, SMALL))
    shorter = tensors | {name: tensors[name][:-1].clone()}
    with pytest.raises(ModelError, match=f"{name} is .* config.json makes it"):
        build(make(shorter, SMALL))


def test_the_rotation_is_read_for_each_type_of_layer(make: Make) -> None:
    builder = make(whole(), rope_theta=5e5, rope_local_base_freq=1e4)
    defaults = RopeDefaults(scales_windows=False)
    assert builder.rope() == RopeSpec(WIDTH, WIDTH, 5e5)
    assert builder.rope("sliding_attention", defaults) == RopeSpec(WIDTH, WIDTH, 1e4)
