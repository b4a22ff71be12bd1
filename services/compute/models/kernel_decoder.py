"""A decoder on a GPU, by launches that can be captured.

Shape legend: T tokens (the bucket), E hidden width, V vocabulary, S sampled rows, N pages,
K kv heads, P positions in a page, D head width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.distributed.shard import Shard
from services.compute.kernels.rows.add_norm import add_norm
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowForm, quantize_rows
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.sampling.sample import VocabularyPart
from services.compute.kernels.sampling.scale_logits import scale_logits
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.kernel_context import ONE_CONTEXT, KernelContext
from services.compute.layers.kernel_experts import ExpertProduct
from services.compute.layers.kernel_ranks import RankSizes, kernel_ranks
from services.compute.layers.kernel_step import (
    KernelDevice,
    KernelStep,
    LayerCache,
    StreamBuffers,
)
from services.compute.layers.parts import Experts
from services.compute.layers.products import Products
from services.compute.layers.scratch import Scratch
from services.compute.layers.weighted_layers import AnyLinear, QuantizedLinear, SummedLinear
from services.compute.models.alike_layers import NOTING, differing, kind_of
from services.compute.models.decoder import Decoder


class DeviceProducts(NamedTuple):
    """How a device multiplies by linear maps, and by those of experts."""

    maps: Products
    experts: ExpertProduct
    pdl: bool  # kernels of ours begin while the one before them ends (dependent launch)


class KernelDecoder:
    """Launches the pass of a bucket, and what is made of the hidden states that it leaves."""

    def __init__(
        self,
        decoder: Decoder[AnyLinear],
        inputs: StepInputs,
        multiply: DeviceProducts,
        max_positions: int,
        ranks: Ranks = ALONE,
        context: KernelContext = ONE_CONTEXT,
    ) -> None:
        """The ranks have a part of the model each."""
        self._context = context
        shape, device, dtype = decoder.shape, decoder.device, decoder.dtype
        max_tokens, max_samples = len(inputs.tokens_T), len(inputs.sample_token_S)
        ropes = {mixer.rope for mixer in decoder.mixers if mixer.rope is not None}
        temperatures = {mixer.temperature for mixer in decoder.mixers}
        positions_P = torch.arange(max_positions, device=device)
        stream = StreamBuffers.make(max_tokens, shape.hidden_size, dtype, device)
        vocabulary = [Shard(rank, ranks.size).part(shape.vocab_size) for rank in range(ranks.size)]
        begins = (*(part.start for part in vocabulary), shape.vocab_size)
        is_tree = any(isinstance(linear, SummedLinear) for linear in decoder.linears)
        summands = torch.float32 if is_tree else dtype  # of a tree only the top is rounded
        top_k = max(map(_pairs_added, decoder.mixtures.values()), default=0) if is_tree else 0
        rank_sizes = RankSizes(max_tokens, shape.hidden_size, summands, max_samples, begins, top_k)
        self._decoder = decoder
        self._device = KernelDevice(
            inputs=inputs,
            stream=stream,
            ranks=kernel_ranks(ranks, rank_sizes, stream.delta_TE),
            scratch=Scratch(dtype, device),
            kept=Scratch(dtype, device),
            products=multiply.maps,
            experts=multiply.experts,
            ropes={rope: _on(device, rope.tables(max_positions)) for rope in ropes},
            query_factors={each: each.at(positions_P) for each in temperatures if each is not None},
            pdl=multiply.pdl,
            norms_apart=ranks.size > 1 or decoder.layers[-1].last[0] is not None,
        )
        self._sampled_SE = torch.zeros(max_samples, shape.hidden_size, dtype=dtype, device=device)
        self.logits_SV = torch.zeros(max_samples, shape.vocab_size, device=device)
        self._seen: dict[int, Tensor] = {}
        self._kinds: list[Hashable] = []  # of layers

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def max_tokens(self) -> int:
        return len(self._device.stream.x_TE)

    @property
    def hidden_TE(self) -> Tensor:
        """The stream, of as many tokens as a step may have."""
        return self._device.stream.x_TE

    def show(self, layers: Sequence[int]) -> list[Tensor]:
        """Where every pass from now on leaves what comes into these layers, as many tokens as there
        may be [T, E]."""
        for layer in layers:
            self._seen.setdefault(layer, torch.zeros_like(self._device.stream.x_TE))
        return [self._seen[layer] for layer in layers]

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self._decoder.is_last

    @property
    def hidden_size(self) -> int:
        return self._decoder.shape.hidden_size

    def forward(
        self, num_tokens: int, caches: Sequence[LayerCache], attention: KernelAttention
    ) -> None:
        """Leave the hidden states of T tokens in the stream, the last layer's part apart where
        logits are made of them.

        A stage that is not the first goes on with those that lie there. Keys and values of the step
        are stored in the `caches` of the layers.
        """
        decoder = self._decoder
        step = KernelStep(self._device, num_tokens, caches, attention, self._seen)
        hidden = step.embed(decoder.embedding) if decoder.is_first else step.begin()
        passed = self._abridged(caches) if NOTING.get() else decoder
        passed.forward(hidden, step)
        step.finish(hidden, is_whole=decoder.leaves_whole or not decoder.is_last)

    def _abridged(self, caches: Sequence[LayerCache]) -> Decoder[AnyLinear]:
        """Without layers that launch what others do."""
        layers = self._decoder.layers
        self._kinds = self._kinds or [kind_of(layer) for layer in layers]
        kinds = list(zip(self._kinds, map(kind_of, caches), strict=True))
        return replace(self._decoder, layers=differing(layers, kinds))

    @property
    def is_split(self) -> bool:
        """Whether other ranks have parts of it."""
        return self._device.ranks.is_split

    def agree(self, words_NW: Tensor) -> None:
        """Replace these words (int32), no more than there are logits, by rank 0's."""
        self._device.ranks.agree(words_NW)

    def vocabulary_part(self, num_samples: int) -> VocabularyPart | None:
        """How ranks draw so many samples of a part of the vocabulary each, if they can."""
        return self._device.ranks.vocabulary_part(num_samples)

    def logits_at(self, index_S: Tensor, *, is_part: bool = False) -> Tensor:
        """Float32 logits [S, V] after these tokens (int32) of the forward pass before, no more than
        may be sampled; they lie where those of the last call lay. `is_part`: this rank's part."""
        sampled_SE = self._sampled_SE[: len(index_S)]
        self.normed_at(index_S, sampled_SE)
        return self.logits_of(sampled_SE, is_part=is_part)

    def logits_of(self, normed_SE: Tensor, *, is_part: bool = False) -> Tensor:
        """The same of any hidden states behind the final norm."""
        num_samples = len(normed_SE)
        logits_SV = self.logits_SV[:num_samples]
        self._context.agree(normed_SE)
        decoder, ranks = self._decoder, self._device.ranks
        product = self._device.products[type(decoder.head)]
        form = product.row_form(num_samples, decoder.head)
        part_SV = ranks.logits_room(logits_SV)
        product(self._as(form, normed_SE), decoder.head, part_SV)
        if is_part:
            logits_SV = part_SV
        else:
            ranks.complete(logits_SV)
        if decoder.logit_scale != 1.0 or decoder.logit_softcap:
            scale_logits(logits_SV, decoder.logit_scale, decoder.logit_softcap)
        return logits_SV

    def _as(self, form: RowForm | None, x_SE: Tensor) -> Tensor | QuantizedRows:
        """Rows in the form that the head's product wants, in memory of the pass before."""
        if form is None:
            return x_SE
        self._device.scratch.rewind()
        memory = self._device.scratch.take_bytes(QuantizedRows.num_bytes(form, *x_SE.shape))
        rows = QuantizedRows.within(memory, form, *x_SE.shape)
        quantize_rows(x_SE, rows, pdl=self._device.pdl)
        return rows

    @property
    def _is_whole(self) -> bool:
        """Whether the last layer's part is in the stream behind a pass, not beside it."""
        return self._device.ranks.is_split or self._decoder.leaves_whole

    def made(self, out_TE: Tensor) -> None:
        """Hidden states [T, E] of the pass's first tokens as the last layer makes them, which no
        norm has seen."""
        num_tokens, stream = len(out_TE), self._device.stream
        out_TE.copy_(stream.x_TE[:num_tokens])
        if not self._is_whole:
            behind, scale = self._decoder.layers[-1].last
            add_norm(out_TE, stream.delta_TE[:num_tokens], None, None, post=behind, scale=scale)

    def normed_at(self, index_S: Tensor, out_SE: Tensor) -> None:
        """Hidden states [S, E] of these tokens (int32) after the final norm."""
        stream, (behind, scale) = self._device.stream, self._decoder.layers[-1].last
        if self._decoder.norm is None:
            torch.index_select(stream.x_TE, 0, index_S, out=out_SE)
            return
        is_whole = self._is_whole
        if is_whole:
            behind, scale = None, 1.0
        add_norm(
            stream.x_TE,
            None if is_whole else stream.delta_TE,
            self._decoder.norm,
            out_SE,
            post=behind,
            scale=scale,
            index_S=index_S,
        )


def _pairs_added(experts: Experts[AnyLinear]) -> int:
    """Rows of a token that ranks add up before they are weighted, as of one rank: of experts that
    are numbers."""
    return 0 if isinstance(experts.down[0], QuantizedLinear) else experts.routing.top_k


def _on(device: torch.device, tables: tuple[Tensor, Tensor]) -> RotaryTables:
    cos_PJ, sin_PJ = tables
    return RotaryTables(cos_PJ.to(device), sin_PJ.to(device))
