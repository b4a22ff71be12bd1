"""Orders and reports as frames."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from common.child_main import HEADER
from common.messages.sampling import GrammarSpec
from services.compute.grammar.protocol import (
    AcceptTokens,
    CompileGrammar,
    GrammarCompiled,
    MasksWritten,
    Order,
    Report,
    SequenceFailed,
    StartSequence,
    pack_order,
    pack_report,
    unpack_order,
    unpack_report,
)

GRAMMAR_SPEC = GrammarSpec("start: /a/", (1, 2), ((3,), (4, 5)))
ORDERS: list[Order] = [
    CompileGrammar(7, "start: /ä/"),
    StartSequence(3, 9, GRAMMAR_SPEC, (2,), (5,), 0, True, 50, (7, 8, 9)),
]
REPORTS: list[Report] = [
    MasksWritten(),
    GrammarCompiled(1),
    GrammarCompiled(2, "bad"),
    SequenceFailed(1, 2, "x"),
]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    assert unpack_order(pack_order(order)[HEADER.size :]) == order


def test_tokens_arrive_in_their_columns() -> None:
    rows_R4 = np.arange(12, dtype=np.int32).reshape(3, 4)
    order = unpack_order(pack_order(AcceptTokens(rows_R4))[HEADER.size :])
    assert isinstance(order, AcceptTokens)
    assert order.rows_R4.tolist() == rows_R4.tolist()


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    assert unpack_report(msgpack.unpackb(pack_report(report)[HEADER.size :])) == report
