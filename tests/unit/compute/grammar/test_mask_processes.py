"""Which of the processes that make masks gets which orders."""

from __future__ import annotations

import numpy as np

from common.child_main import HEADER
from common.messages.sampling import GrammarSpec
from services.compute.grammar.mask_processes import SharedOrders
from services.compute.grammar.protocol import AcceptTokens, CompileGrammar, Order, unpack_order
from tests.unit.compute.grammar.structured_plans import make_start


class Process:
    """Keeps what it is given, as an order or as a frame."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def take(self, order: Order) -> None:
        self.orders.append(order)

    def write(self, frame: bytes) -> None:
        self.orders.append(unpack_order(frame[HEADER.size :]))


def shared(order: Order) -> list[list[Order]]:
    """What each of three processes gets of an order."""
    processes = [Process() for _ in range(3)]
    SharedOrders(processes[0], processes[1:]).take(order)  # type: ignore[arg-type]
    return [process.orders for process in processes]


def test_a_sequence_is_its_slots_process_from_its_start_on() -> None:
    for slot in range(7):
        start = make_start(GrammarSpec("start: /a/"), slot=slot)
        assert shared(start) == [[start] if slot % 3 == number else [] for number in range(3)]


def test_tokens_go_where_their_sequences_are() -> None:
    rows_R4 = np.array([(slot, 1, slot + 5, 9) for slot in (4, 0, 3, 7, 6)], dtype=np.int32)
    own, second, third = shared(AcceptTokens(rows_R4))
    assert third == []
    for orders, slots in ((own, [0, 3, 6]), (second, [4, 7])):
        (order,) = orders
        assert isinstance(order, AcceptTokens)
        assert order.rows_R4.tolist() == [[slot, 1, slot + 5, 9] for slot in slots]


def test_all_know_a_grammar_before_anyone_knows_its_slot() -> None:
    order = CompileGrammar(3, "start: /a/")
    assert shared(order) == [[order]] * 3
