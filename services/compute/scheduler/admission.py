"""Admission: from the waiting line to a slot, with pages for all that is known of the sequence."""

from __future__ import annotations

from services.compute.kv.memory import KVMemory
from services.compute.kv.prefix import Node
from services.compute.scheduler.residents import Residents
from services.compute.scheduler.sequence import Sequence
from services.compute.scheduler.transfers import Transfers
from services.compute.scheduler.waiting import WaitingLine


class Admission:
    """Lets the first in line run when its prompt fits, and keeps strict order: nobody overtakes.

    Pages for all known tokens are taken at once, so a prefill in chunks never starves half way;
    pages for generated tokens come one by one. While others run, one page in four of them stays
    free, which is what they will need within the next four steps or so: without it the newcomer
    is soon the youngest when pages run out, and its prefill is lost.
    """

    __slots__ = (
        "_found",
        "_head",
        "_memory",
        "_residents",
        "_transfers",
        "_waiting",
        "cached_tokens_total",
        "num_started_total",
        "prompt_tokens_total",
    )

    def __init__(
        self, memory: KVMemory, residents: Residents, waiting: WaitingLine, transfers: Transfers
    ) -> None:
        self._memory = memory
        self._residents = residents
        self._waiting = waiting
        self._transfers = transfers
        self._head: Sequence | None = None  # whose turn it is, though it did not fit
        self._found: list[Node] = []  # its pages that others have
        self.num_started_total = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0

    def admit(self, sequence: Sequence) -> bool:
        """Give the first in line its pages and a slot; False if it has to wait."""
        memory = self._memory
        nodes = self._look_up(sequence)
        num_missing = memory.pages_for(sequence.num_known) - len(nodes)
        room = memory.num_available - len(self._residents.running) // 4
        if num_missing > room - memory.tree.num_idle(nodes):
            return False
        self._head = None
        self._waiting.remove(sequence)
        sequence.table.adopt(nodes)
        if not sequence.table.grow(sequence.num_known):
            raise RuntimeError("pages counted as available could not be taken")
        num_found = len(nodes) * memory.page_tokens
        self._fill(sequence, len(nodes))
        sequence.restart(max(sequence.computed, num_found))
        if not sequence.joined:
            sequence.cached_tokens = min(num_found, sequence.prompt_len)
            self.num_started_total += 1
            self.prompt_tokens_total += sequence.prompt_len
            self.cached_tokens_total += sequence.cached_tokens
        self._residents.enter(sequence)
        return True

    def _look_up(self, sequence: Sequence) -> list[Node]:
        """The pages of a sequence that others have. While it stays the first in line they are
        looked up once, and then only what has come and gone since."""
        found = self._found if sequence is self._head else None
        max_pages = sequence.num_reusable // self._memory.page_tokens
        self._head = sequence
        self._found = sequence.table.find(sequence.page_keys, max_pages, found)
        return self._found

    def _fill(self, sequence: Sequence, num_shared: int) -> None:
        """Bring back from the host what the tree did not know."""
        host_pages = sequence.host_pages
        if not host_pages:
            return
        wanted = host_pages[num_shared:]
        pages = sequence.table.pages
        self._transfers.swap_in(wanted, pages[num_shared : num_shared + len(wanted)])
        self._transfers.spend(host_pages)
        sequence.host_pages = []
