"""Ranks exchange copies of experts by what each of them has counted, and keep to one another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from services.compute.distributed.expert_balance import Layout, slot_table
from services.compute.kernels.experts.routing import HeldExperts, Routing
from services.compute.layers.expert_link import expert_pieces
from services.compute.layers.parts import Experts
from services.compute.layers.weighted_layers import AnyLinear, KernelLinears
from services.compute.quantization.at_load import quantized
from services.compute.runner.cuda import expert_moves
from services.compute.runner.cuda.expert_moves import ExpertMoves
from tests.kernels.host_stream import HostStream
from tests.unit.compute.distributed.rank_threads import Meeting, ThreadLink, ThreadRanks

LAYOUT: Layout = ((0, 1, 2, 3), (0, 4, 5, 6))
NUM_EXPERTS, TURNS = 7, 2


def mixture(rank: int, kind: str, layer: int) -> Experts[AnyLinear]:
    """Of this rank's experts; each has weights of its own."""
    make = KernelLinears(torch.bfloat16, keeps_dense=False)

    def maps(num_out: int, num_in: int) -> tuple[AnyLinear, ...]:
        weights = []
        for expert in LAYOUT[rank]:
            generator = torch.Generator().manual_seed(100 * layer + expert)
            weight = torch.randn(num_out, num_in, generator=generator).bfloat16()
            weights.append(weight if kind == "plain" else quantized(weight, "int4"))
        biases = torch.tensor(LAYOUT[rank]).bfloat16()[:, None].repeat(1, num_out)
        return make.experts(iter(weights), len(weights), biases)

    table = torch.from_numpy(slot_table(LAYOUT, rank, NUM_EXPERTS, TURNS))
    return Experts(
        router=make(torch.zeros(NUM_EXPERTS, 128).bfloat16(), None),
        routing=Routing(NUM_EXPERTS, 2),
        gate_up=maps(64, 128),
        down=maps(128, 64),
        tokens_X=torch.zeros(NUM_EXPERTS, dtype=torch.int64),
        held=HeldExperts(len(LAYOUT[rank]), table),
    )


@pytest.mark.parametrize("kind", ["plain", "int4"])
def test_the_busiest_expert_gets_the_copy_that_nobody_wants(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of two layers, once the counts of some steps are there."""
    monkeypatch.setattr(expert_moves, "INTERVAL", 8)
    monkeypatch.setattr(expert_moves, "DELAY", 2)
    meeting = Meeting(2)

    def serve(rank: int) -> dict[int, Experts[AnyLinear]]:
        mixtures = {layer: mixture(rank, kind, layer) for layer in (3, 5)}
        layouts = dict.fromkeys(mixtures, LAYOUT)
        link = ThreadLink(0, torch.device("cpu"), ThreadRanks(rank, meeting))
        moves = ExpertMoves(mixtures, layouts, rank, link, HostStream())
        for number in range(16):
            moves.step()
            counted(mixtures[3]).add_(10)
            counted(mixtures[5]).add_(torch.tensor([0, 90, 10, 10, 10, 10, 10]))
            if number == 10:  # the look: nothing has changed before it
                assert torch.equal(held(mixtures[5]), held(mixture(rank, kind, 5)))
        return mixtures

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(serve, range(2)))
    layout: Layout = (LAYOUT[0], (1, 4, 5, 6))
    for rank, mixtures in enumerate(both):
        assert torch.equal(held(mixtures[3]), held(mixture(rank, kind, 3)))
        table = slot_table(layout, rank, NUM_EXPERTS, TURNS)
        assert held(mixtures[5]).tolist() == table.tolist()
    handed = expert_pieces(both[1][5], 0)
    expected = expert_pieces(mixture(0, kind, 5), 1)
    assert len(handed) == (4 if kind == "plain" else 8)
    assert all(map(torch.equal, handed, expected))
    others = zip(expert_pieces(both[1][5], 1), expert_pieces(mixture(1, kind, 5), 1), strict=True)
    assert all(torch.equal(found, was) for found, was in others)


def held(experts: Experts[AnyLinear]) -> Tensor:
    assert experts.held is not None
    return experts.held.slots_CX


def counted(experts: Experts[AnyLinear]) -> Tensor:
    assert experts.tokens_X is not None
    return experts.tokens_X
