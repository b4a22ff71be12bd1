"""What a heartbeat says of experts, row by row."""

from __future__ import annotations

import pytest

from common.errors import MalformedMessage
from common.link.codec import pack, unpack
from common.messages.arrays import uint32s, uint64s
from common.messages.experts import ExpertLoad


def test_each_layer_has_the_tokens_of_its_experts_and_their_imbalance() -> None:
    load = unpack(ExpertLoad, pack(ExpertLoad(uint32s((1, 3)), uint64s((4, 0, 2, 0, 0, 0)))))
    layers = list(load.by_layer())
    assert [(one.layer, one.tokens.tolist()) for one in layers] == [(1, [4, 0, 2]), (3, [0, 0, 0])]
    assert [one.imbalance for one in layers] == [2.0, 1.0]


@pytest.mark.parametrize(("num_layers", "num_tokens"), [(0, 0), (0, 2), (2, 0), (2, 3)])
def test_rows_that_cannot_be_are_refused(num_layers: int, num_tokens: int) -> None:
    broken = ExpertLoad(uint32s(range(num_layers)), uint64s(range(num_tokens)))
    with pytest.raises(MalformedMessage, match="experts of"):
        unpack(ExpertLoad, pack(broken))
