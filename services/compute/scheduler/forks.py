"""Forks: several choices over one prompt, of which only the first computes it."""

from __future__ import annotations

from services.compute.scheduler.sequence import Sequence, Status
from services.compute.scheduler.waiting import WaitingLine


class Forks:
    """Followers are parked until a plan has the end of their leader's prompt and its pages are
    published.

    Then they queue, perhaps for the same plan, find all full pages in the prefix tree and compute
    the partial last one for themselves.
    """

    __slots__ = ("_waiting", "num_parked")

    def __init__(self, waiting: WaitingLine) -> None:
        self._waiting = waiting
        self.num_parked = 0

    def park(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Let these wait for the leader."""
        for follower in followers:
            follower.status = Status.PARKED
            follower.leader = leader
        leader.followers = followers
        self.num_parked += len(followers)

    def release(self, leader: Sequence) -> None:
        """The leader's prompt pages can be found: its followers queue."""
        for follower in leader.followers:
            self._queue(follower)
        leader.followers = []

    def leave(self, follower: Sequence) -> None:
        """A parked sequence ended."""
        leader = follower.leader
        if leader is not None:
            leader.followers.remove(follower)
            follower.leader = None
            self.num_parked -= 1

    def succeed(self, leader: Sequence) -> None:
        """A leader ended too early: the first of its followers takes its place."""
        if not leader.followers:
            return
        successor, *rest = leader.followers
        leader.followers = []
        self._queue(successor)
        for follower in rest:
            follower.leader = successor
        successor.followers = rest

    def _queue(self, follower: Sequence) -> None:
        follower.leader = None
        follower.status = Status.WAITING
        self.num_parked -= 1
        self._waiting.add(follower)
