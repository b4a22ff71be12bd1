"""Leases: any message renews one, silence ends it, and a process that stood still ends none."""

from __future__ import annotations

from collections.abc import Iterable

from common.leases import ExpiredLease, Leases


def ticked(leases: Leases, start_s: float, end_s: float) -> list[tuple[float, ExpiredLease[str]]]:
    """Judge every tenth of a second from start to end; returns when who lapsed."""
    found = []
    for tick in range(round(start_s * 10), round(end_s * 10) + 1):
        found += [(tick / 10, lease) for lease in leases.judge(tick / 10)]
    return found


def granted(*peers: str, lease_s: float = 0.0) -> Leases:
    leases = Leases()
    for peer in peers:
        leases.grant(peer, 0.0, lease_s)
    return leases


def names(lapses: Iterable[ExpiredLease[str]]) -> list[str]:
    return [lapse.peer for lapse in lapses]


def test_a_silent_peer_is_dead_after_two_seconds() -> None:
    leases = granted("a")
    assert ticked(leases, 0.0, 5.0) == [(2.1, ExpiredLease("a", "dead"))]
    assert "a" not in leases


def test_any_message_renews_a_lease() -> None:
    leases = granted("a", "b")
    ticked(leases, 0.0, 1.5)
    leases.heard("a", 1.5)
    assert [lapse.peer for _, lapse in ticked(leases, 1.6, 3.4)] == ["b"]
    assert leases.is_live("a", 3.4)


def test_a_message_from_a_stranger_makes_no_lease() -> None:
    leases = granted()
    leases.heard("a", 0.0)
    assert "a" not in leases


def test_a_peer_may_have_a_longer_lease_of_its_own() -> None:
    leases = granted("slow", lease_s=10.0)
    assert ticked(leases, 0.0, 9.9) == []
    assert ticked(leases, 10.0, 10.2) == [(10.1, ExpiredLease("slow", "dead"))]


def test_expiry_shows_before_it_is_judged() -> None:
    leases = granted("a")
    assert not leases.is_live("a", 2.5)
    assert "a" in leases


def test_no_peer_is_judged_while_messages_are_unread() -> None:
    leases = granted("a")
    ticked(leases, 0.0, 2.0)
    assert leases.judge(2.3, inbox_empty=False) == []
    assert names(leases.judge(2.4)) == ["a"]


def test_all_leases_start_again_when_the_judge_itself_stood_still() -> None:
    leases = granted("a")
    leases.judge(1.0)
    assert leases.judge(4.0) == []
    assert leases.is_live("a", 4.0)
    assert [when for when, _ in ticked(leases, 4.1, 7.0)] == [6.1]


def test_without_progress_in_its_own_bound_a_busy_peer_is_hung() -> None:
    leases = granted("a", lease_s=100.0)
    leases.report("a", progress=5, num_open=1, stall_after_s=3.0, now_s=0.0)
    assert ticked(leases, 0.0, 4.0) == [(3.1, ExpiredLease("a", "hung"))]


def test_progress_keeps_a_busy_peer() -> None:
    leases = granted("a", lease_s=100.0)
    for second in range(10):
        leases.report("a", second, 1, 3.0, float(second))
        assert ticked(leases, second, second + 0.9) == []


def test_an_idle_peer_need_not_progress() -> None:
    leases = granted("a", lease_s=100.0)
    leases.report("a", 5, 0, 3.0, 0.0)
    assert ticked(leases, 0.0, 50.0) == []


def test_the_bound_counts_from_when_work_was_given() -> None:
    leases = granted("a", lease_s=100.0)
    leases.report("a", 5, 0, 3.0, 0.0)
    ticked(leases, 0.0, 10.0)
    leases.report("a", 5, 1, 3.0, 10.0)
    assert ticked(leases, 10.1, 12.9) == []


def test_a_forgotten_peer_does_not_lapse() -> None:
    leases = granted("a")
    leases.forget("a")
    leases.forget("a")
    assert ticked(leases, 0.0, 5.0) == []
