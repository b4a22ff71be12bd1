"""What a step on a GPU launches, in which order, and where its results lie."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from services.compute.layers.quantized_product import ROW_LIMITS
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import Linear
from services.compute.models.decoder import Decoder
from tests.kernels.recorded_step import (
    CPU,
    LAYERS,
    MAX_TOKENS,
    Quantizing,
    Recorder,
    decoder_of,
    device_of,
    launch,
    run,
)


class TestScratch:
    def test_a_sublayer_finds_the_same_memory_again(self) -> None:
        scratch = Scratch(torch.float16, CPU)
        for rows in (8, 3, 1):
            scratch.rewind()
            first = [scratch.take(rows, 10), scratch.take(rows, 20), scratch.take(rows, 5)]
            scratch.rewind()
            again = [scratch.take(rows, 10), scratch.take(rows, 20), scratch.take(rows, 5)]
            assert [x.shape for x in again] == [(rows, 10), (rows, 20), (rows, 5)]
            for one, other in zip(first, again, strict=True):
                assert other.data_ptr() == one.data_ptr()
                assert other.is_contiguous() and other.dtype == torch.float16

    def test_results_of_one_sublayer_do_not_overlap(self) -> None:
        scratch = Scratch(torch.float32, CPU)
        for rows in (40, 4):
            scratch.rewind()
            results = [scratch.take(rows, width) for width in (7, 3, 9, 3)]
            results.append(scratch.take_bytes(30).view(torch.int8)[None])
            for number, result in enumerate(results):
                result.fill_(number)
            found = [set(result.flatten().tolist()) for result in results]
            assert found == [{number} for number in range(5)]

    def test_what_fewer_rows_take_is_there_already_and_stays(self) -> None:
        """In whatever order, as products of few rows may take their inputs in another form."""
        scratch = Scratch(torch.float32, CPU)
        for width in (4, 12, 6):
            scratch.take(64, width)
        pieces = [piece.data_ptr() for piece in scratch._pieces]
        scratch.rewind()
        for num_bytes in (500, 384, 90, 1000):
            scratch.take_bytes(num_bytes)
        assert [piece.data_ptr() for piece in scratch._pieces] == pieces

    def test_it_does_not_grow_while_a_graph_is_captured(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scratch = Scratch(torch.float32, CPU)
        scratch.take(2, 4)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(scratch, "_like", SimpleNamespace(is_cuda=True, dtype=torch.float32))
        scratch.rewind()
        with pytest.raises(RuntimeError, match="must not grow while a graph is captured"):
            scratch.take(3, 4)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        yield patch


def test_one_token_takes_six_launches_a_layer(patched: pytest.MonkeyPatch) -> None:
    recorder = Recorder(takes_norms=True, can_gate=False)
    run(decoder_of(), 1, recorder, patched)
    layer = ["normed product", "rotate", "attend", "product", "normed gated silu", "product"]
    assert recorder.log == ["plan", *layer * LAYERS]


@pytest.mark.parametrize("num_tokens", [2, MAX_TOKENS])
def test_few_rows_take_eight_launches_a_layer_and_many_nine(
    patched: pytest.MonkeyPatch, num_tokens: int
) -> None:
    for can_gate, gated in ((True, ["gated silu"]), (False, ["product", "silu * up"])):
        recorder = Recorder(takes_norms=False, can_gate=can_gate)
        run(decoder_of(), num_tokens, recorder, patched)
        mixer = ["product", "rotate", "attend", "product"]
        layer = ["add norm", *mixer, "add norm", *gated, "product"]
        assert recorder.log == ["plan", "norm", *(layer * LAYERS)[1:]]


def test_the_stream_of_one_token_swaps_in_each_launch_and_ends_where_it_is_looked_for(
    patched: pytest.MonkeyPatch,
) -> None:
    """A launch writes the sum while other programs of it read the stream."""
    recorder = Recorder(takes_norms=True, can_gate=False)
    hidden, stream = run(decoder_of(), 1, recorder, patched)
    first, *others = recorder.normed_inputs
    assert len(others) == 2 * LAYERS - 1
    assert first.delta_TE is None
    at = stream.x_TE.data_ptr()
    for normed in (first, *others):
        assert normed.sum_TE is not None
        assert normed is first or normed.delta_TE.data_ptr() == stream.delta_TE.data_ptr()
        assert normed.x_TE.data_ptr() == at
        at = normed.sum_TE.data_ptr()
        assert at != normed.x_TE.data_ptr()
        assert at in (stream.x_TE.data_ptr(), stream.other_1E.data_ptr())
    assert hidden.x_TE.data_ptr() == at == stream.x_TE.data_ptr()
    assert hidden.delta_TE is not None and hidden.delta_TE.data_ptr() == stream.delta_TE.data_ptr()


def test_norms_in_launches_of_their_own_are_added_in_place(patched: pytest.MonkeyPatch) -> None:
    recorder = Recorder(takes_norms=True, can_gate=False)
    hidden, stream = run(decoder_of("CohereForCausalLM"), 1, recorder, patched)  # parts share them
    assert hidden.x_TE.data_ptr() == stream.x_TE.data_ptr()


class TakingSome(Recorder):
    """Takes norms into the products of these linear maps only, by their numbers in the model."""

    def __init__(self, decoder: Decoder[Linear], taking: set[int]) -> None:
        super().__init__(takes_norms=True, can_gate=False)
        self._taking = [decoder.linears[number].weight_OI.data_ptr() for number in taking]

    def can_norm(self, num_tokens: int, linear: Linear, norms_behind: bool) -> bool:
        return linear.weight_OI.data_ptr() in self._taking


QKVS, GATES = {0, 4, 8}, {2, 6, 10}


@pytest.mark.parametrize("taking", [QKVS, GATES, {0}, {4, 6}, {2, 8, 10}])
def test_maps_that_take_no_norm_get_it_by_a_launch_beside_those_that_do(
    taking: set[int], patched: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of()
    recorder = TakingSome(decoder, taking)
    hidden, stream = run(decoder, 1, recorder, patched)
    expected = ["plan"]
    for layer in range(LAYERS):
        mixer = ["product", "rotate", "attend", "product"]
        expected += [*([] if 4 * layer in taking else ["add norm"]), *mixer]
        expected += [*([] if 4 * layer + 2 in taking else ["add norm"]), "product", "silu * up"]
        expected.append("product")
    if 0 not in taking:
        expected[1] = "norm"
    simple = {"normed product": ["product"], "normed gated silu": ["product", "silu * up"]}
    assert [part for entry in recorder.log for part in simple.get(entry, [entry])] == expected
    # each sum goes where the stream is not, and the last to where it is looked for, or is copied
    at = stream.x_TE.data_ptr()
    for normed in recorder.normed_inputs:
        assert normed.sum_TE is not None and normed.x_TE.data_ptr() == at
        at = normed.sum_TE.data_ptr()
        assert at != normed.x_TE.data_ptr()
    assert hidden.x_TE.data_ptr() == at
    assert (at == stream.other_1E.data_ptr()) == bool(len(taking) % 2)
    assert torch.equal(stream.x_TE[:1], hidden.x_TE)


def test_gates_with_biases_take_the_norm_into_their_launch_too(
    patched: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(takes_norms=True, can_gate=False)
    run(decoder_of(mlp_bias=True), 1, recorder, patched)
    layer = ["normed product", "rotate", "attend", "product", "normed product", "silu * up"]
    assert recorder.log == ["plan", *[*layer, "product"] * LAYERS]


def test_parallel_parts_share_a_norm_and_their_sums_are_done_one_by_one(
    patched: pytest.MonkeyPatch,
) -> None:
    for num_tokens in (1, 4):
        recorder = Recorder(takes_norms=num_tokens == 1, can_gate=False)
        run(decoder_of("CohereForCausalLM"), num_tokens, recorder, patched)
        mixer = ["product", "rotate", "attend", "product"]
        layer = ["add norm", *mixer, "add", "product", "silu * up", "product"]
        assert recorder.log == ["plan", "norm", *(layer * LAYERS)[1:]]


def test_norms_behind_the_parts_are_in_the_launch_of_the_next_norm(
    patched: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(takes_norms=True, can_gate=False)
    decoder = decoder_of("Glm4ForCausalLM", partial_rotary_factor=0.5)
    hidden, _ = run(decoder, 1, recorder, patched)
    behind = []
    for layer in decoder.layers:
        behind += [layer.mixer.behind, layer.feed_forward.behind]
    assert [normed.post for normed in recorder.normed_inputs] == [None, *behind[:-1]]
    assert (hidden.behind, hidden.scale) == decoder.layers[-1].last == (behind[-1], 1.0)


def test_products_are_asked_whether_they_take_norms_behind_the_parts_too(
    patched: pytest.MonkeyPatch,
) -> None:
    for name, behind in (("LlamaForCausalLM", False), ("Gemma3ForCausalLM", True)):
        recorder = Recorder(takes_norms=False, can_gate=True)
        hidden, stream = run(decoder_of(name), 1, recorder, patched)
        assert recorder.norms_behind is behind
        mixer = ["product", "rotate", "attend", "product"]
        layer = ["add norm", *mixer, "add norm", recorder.log[7], "product"]
        assert recorder.log == ["plan", "norm", *(layer * LAYERS)[1:]]
        assert hidden.x_TE.data_ptr() == stream.x_TE.data_ptr()  # nothing to copy at the end


def test_a_scale_of_what_is_added_is_in_the_launch_of_the_next_norm(
    patched: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(takes_norms=True, can_gate=False)
    decoder = decoder_of("GraniteForCausalLM", residual_multiplier=0.25)
    hidden, _ = run(decoder, 1, recorder, patched)
    assert [normed.scale for normed in recorder.normed_inputs] == [1.0] + [0.25] * 5
    assert (hidden.behind, hidden.scale) == decoder.layers[-1].last == (None, 0.25)


def test_an_mlp_without_gates_is_activated_where_it_lies(patched: pytest.MonkeyPatch) -> None:
    recorder = Recorder(takes_norms=False, can_gate=True)
    run(decoder_of("NemotronForCausalLM", num_hidden_layers=1), 4, recorder, patched)
    assert recorder.log[-3:] == ["product", "relu2", "product"]


@pytest.mark.parametrize("limit", ROW_LIMITS[:-1])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "NemotronForCausalLM", "CohereForCausalLM"])
@pytest.mark.parametrize("max_tokens", [68, 128, 520, 768])
def test_the_largest_pass_of_each_form_leaves_scratch_for_all_others(
    name: str, max_tokens: int, limit: int, patched: pytest.MonkeyPatch
) -> None:
    """Rows as codes are one result more where something else is there of them already."""
    decoder, recorder = decoder_of(name), Quantizing(limit)
    device = device_of(decoder, recorder, max_tokens, patched)
    sizes = range(1, max_tokens + 1)
    rehearsed = {max_tokens, *(max(s for s in sizes if s <= limit) for limit in ROW_LIMITS)}
    for num_tokens in sorted(rehearsed, reverse=True):
        launch(decoder, num_tokens, device, recorder)
    pieces = len(device.scratch._pieces)
    for num_tokens in reversed(sizes):
        launch(decoder, num_tokens, device, recorder)
    assert len(device.scratch._pieces) == pieces
