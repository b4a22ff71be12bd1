"""Cache entries of tokens that one rank has computed: what a launch makes of all ranks' memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import FP8, INT8, LayerPages
from services.compute.kernels.ranks.rank_entries import (
    StagedEntries,
    exchange_entries,
    exchange_entries_reference,
)
from services.compute.kernels.step.step_buffers import HEADER_INTS, NUM_OWN, NUM_TOKENS
from tests.kernels.quantized_pages import layer_of
from tests.kernels.rank_memory import Ranks, random

MAX_OWN, NUM_PAGES, PAGE_TOKENS, IN_COMMON = 12, 7, 4, 2
FORMS = [
    (2, (3, 16), torch.bfloat16, 0),
    (2, (2, 64), FP8, 0),
    (1, (1, 40), torch.float32, 32),
    (1, (1, 48), INT8, 32),
]
"""Parts, heads and their width, entries, and the width of a latent."""


def pages_of(form: tuple[int, tuple[int, int], torch.dtype, int], seed: int) -> LayerPages:
    parts, (heads, width), entry, latent_dim = form
    values = random((NUM_PAGES, parts, heads, PAGE_TOKENS, width), seed)
    is_quantized = entry in (FP8, INT8)
    values = values.to(torch.float32 if is_quantized else entry)
    return layer_of(values, entry if is_quantized else None, latent_dim)


def bits(pages: LayerPages) -> list[Tensor]:
    return [part.contiguous().view(torch.uint8) for part in pages if part is not None]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("size", "num_own"), [(2, 11), (4, 5), (2, 0)])
def test_ranks_have_one_anothers_entries(
    form: tuple[int, tuple[int, int], torch.dtype, int],
    size: int,
    num_own: int,
    device: torch.device,
) -> None:
    """In turns: the last of each rank's launches finds what the others have left."""
    layers = [pages_of(form, seed) for seed in range(size)]
    places = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=torch.Generator().manual_seed(1))
    common, *own = places[: IN_COMMON + size * num_own].split([IN_COMMON, *[num_own] * size])
    token_bytes = layers[0].entries[0, :, :, 0].numel() * layers[0].entries.element_size() + 16
    header = torch.zeros(HEADER_INTS, dtype=torch.int32, device=device)
    header[NUM_TOKENS], header[NUM_OWN] = IN_COMMON + num_own, num_own
    ranks = [Ranks(rank, size, device) for rank in range(size)]
    staged = [StagedEntries(header, each.memory, MAX_OWN, token_bytes) for each in ranks]
    room = [torch.zeros(2 * staged[0].turn_bytes, dtype=torch.uint8, device=device) for _ in ranks]
    layers = [LayerPages(*(None if x is None else x.to(device) for x in each)) for each in layers]

    def launch(rank: int, pages: LayerPages) -> None:
        slots = torch.cat((common, own[rank], torch.tensor([-1])))
        memory = staged[rank]._replace(staged_R=ranks[rank].addresses(room))
        exchange_entries(pages, slots.to(device), header, memory)

    for rank in range(size):  # the others read what is not there yet
        launch(rank, copied(layers[rank]))
    expected = [copied(layer) for layer in layers]
    exchange_entries_reference(expected, [slots.to(device) for slots in own])
    for each in ranks:
        each.memory.meetings_P.zero_()
    for rank in range(size):
        launch(rank, layers[rank])
        assert all(map(torch.equal, bits(layers[rank]), bits(expected[rank])))
        assert ranks[rank].memory.meetings_P[0] == (num_own > 0)


def copied(pages: LayerPages) -> LayerPages:
    """In memory of the same strides."""

    def copy(part: Tensor) -> Tensor:
        return torch.empty_strided(
            part.shape, part.stride(), dtype=part.dtype, device=part.device
        ).copy_(part)

    return LayerPages(copy(pages.entries), None if pages.scales is None else copy(pages.scales))
