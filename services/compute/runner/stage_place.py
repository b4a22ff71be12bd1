"""A stage's place among the others, as each of its ranks knows it.

All ranks of a stage have the same hidden states, bit for bit, so rank r gives its own to rank r of
the next one. No rank waits for another to have them, and a rank is linked as a stage of one is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from common.config import LinkSettings
from common.link.curve import Keys, load_keys
from common.link.inbox import require_keys
from common.link.resolve import TcpPlace, literal_now, tcp_place

if TYPE_CHECKING:  # links want torch, which takes a second to import; a place is known without
    from services.compute.distributed.stage_link import LinkedStages, StageLink


class StagePlace(BaseModel):
    """Which stage it is, and where the ranks of all stages are to be found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    inboxes: tuple[str, ...]  # of the stages' ranks 0, in the order of layers
    are_here: bool  # all on this host
    links: LinkSettings

    @property
    def number_here(self) -> int:
        """How many stages before it are on this host."""
        return self.number if self.are_here else 0

    def linked(self, link: StageLink, rank: int = 0) -> LinkedStages:
        """The stages as this rank sees them, through its own link."""
        from services.compute.distributed.stage_link import LinkedStages

        count = len(self.inboxes)
        following = literal(inbox_of(self.inboxes[(self.number + 1) % count], rank))
        stages = LinkedStages(self.number, count, link, link.connect(following))
        stages.num_here = count if self.are_here else 1
        return stages

    def follower(self, rank: int) -> LinkedStages:
        """The same of a rank that follows: which processes are lost rank 0 sees, and ends it."""
        from services.compute.distributed.stage_link import StageLink

        inbox = inbox_of(self.inboxes[self.number], rank)
        link = StageLink(keys_for(inbox, self.links), lambda: None)
        link.bind(literal(inbox))
        return self.linked(link, rank)


def inbox_of(inbox: str, rank: int) -> str:
    """Of a rank of the stage whose rank 0 has this inbox: so many ports above it."""
    if not rank:
        return inbox
    place = tcp_place(inbox)
    if place is None:
        return f"{inbox}-{rank}"
    return str(TcpPlace(place.host, str(int(place.port) + rank)))


def keys_for(inbox: str, links: LinkSettings) -> Keys | None:
    """The keys that processes at this inbox need; ConfigError where they are missing."""
    place = tcp_place(inbox)
    if place is None:
        return None
    keys = load_keys(links.curve_dir, "compute") if links.curve_dir else None
    require_keys(place, keys, links.insecure)
    return keys


def literal(inbox: str) -> str:
    """The same with an address in place of a name, as libzmq wants it."""
    place = tcp_place(inbox)
    return inbox if place is None else str(literal_now(place))
