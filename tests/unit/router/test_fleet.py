"""The fleet: registration, leases, model revisions, placement."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.address import PROTOCOL_VERSION, Address
from common.messages.arrays import int64s
from common.messages.control import Load, ModelCard, ServiceName, WorkerAlive
from services.router.breaker import FIRST_PAUSE_S, MAX_FAILURES
from services.router.fleet import MAX_REFUSED, MAX_REPLACED, Fleet
from services.router.groups import SERVICES
from services.router.placement import LeastLoad, RoundRobin

CARD = ModelCard("demo", "rev1", 1000, 512, 511, 511)
REPLY = Address("mem://router", "router.1")


def _alive(service: ServiceName, name: str, life: int = 1, **changes: Any) -> WorkerAlive:
    fields: dict[str, Any] = {
        "service": service,
        "address": Address(f"mem://{name}", f"{name}.{life}"),
        "model": CARD,
        "load": Load(0, 0, 8),
        "beat": 1,
        "progress": 1,
        "stall_after_s": 5.0,
        "draining": False,
        "open_counters": int64s(),
        **changes,
    }
    return WorkerAlive(**fields)


def _fleet(now_s: float = 0.0, **changes: Any) -> Fleet:
    fleet = Fleet(RoundRobin(), lease_s=2.0)
    for service in SERVICES:
        fleet.alive(_alive(service, service, **changes), now_s)
    return fleet


def _judge(fleet: Fleet, until_s: float, from_s: float = 0.0) -> list[tuple[str, str]]:
    """Judge ten times a second, as ticks do; a longer pause would count as the judge's own."""
    lapses = []
    for tick in range(int(from_s * 10), int(until_s * 10) + 1):
        lapses += fleet.judge(tick / 10)
    return [(lapse.peer.instance_id, lapse.reason) for lapse in lapses]


def test_one_worker_of_each_service_makes_the_fleet_ready() -> None:
    fleet = Fleet(RoundRobin(), lease_s=2.0)
    assert fleet.missing == SERVICES
    for service in SERVICES:
        assert not fleet.ready
        fleet.alive(_alive(service, service), 0.0)
    assert fleet.ready
    assert fleet.missing == ()


def test_a_route_stays_within_one_model_revision() -> None:
    fleet = _fleet()
    newer = ModelCard("demo", "rev2", 1000, 512, 511, 511)
    fleet.alive(_alive("compute", "newer", model=newer), 0.0)
    group = fleet.group("demo")
    assert group is not None and group.card.revision == "rev1"
    routes = [fleet.route(group, REPLY, 0.0)[0] for _ in range(4)]
    assert {route.compute.instance_id for route in routes} == {"compute.1"}
    assert {route.reply for route in routes} == {REPLY}


def test_a_model_that_nobody_serves_has_no_group() -> None:
    assert _fleet().group("other") is None


def test_a_group_without_a_service_says_what_is_missing() -> None:
    fleet = _fleet()
    fleet.remove("compute.1", 0.0, "dead")
    group = fleet.group("demo")
    assert group is not None and group.missing == ("compute",)
    assert not fleet.ready


def test_the_limits_are_those_of_the_chosen_compute() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "long", model=ModelCard("demo", "rev1", 1000, 4096)), 0.0)
    group = fleet.group("demo")
    assert group is not None
    lengths = [fleet.route(group, REPLY, 0.0)[1].max_model_len for _ in range(4)]
    assert lengths == [512, 4096, 512, 4096]


def _speaker(version: int) -> Address:
    return Address(f"mem://v{version}", f"v{version}.1", version)


@pytest.mark.parametrize("apart", [-1, 0, 1])
def test_a_worker_of_a_release_next_to_the_routers_is_taken(apart: int) -> None:
    assert not Fleet(RoundRobin(), 2.0).mismatch(_speaker(PROTOCOL_VERSION + apart))


@pytest.mark.parametrize("apart", [-2, 2, 1 << 40])
def test_a_worker_further_away_stays_out(apart: int) -> None:
    version = PROTOCOL_VERSION + apart
    why = Fleet(RoundRobin(), 2.0).mismatch(_speaker(version))
    assert why == f"protocol {version} is too far from this router's"


def test_no_route_leads_through_workers_that_do_not_understand_each_other() -> None:
    fleet = Fleet(RoundRobin(), 2.0)
    fleet.alive(_alive("compute", "compute", address=_speaker(PROTOCOL_VERSION - 1)), 0.0)
    next_release = _speaker(PROTOCOL_VERSION + 1)
    assert f"too far from v{PROTOCOL_VERSION - 1}'s" in fleet.mismatch(next_release)
    fleet.remove(f"v{PROTOCOL_VERSION - 1}.1", 0.0, "dead")
    assert not fleet.mismatch(next_release)


def test_a_worker_that_stays_out_is_named_while_it_knocks() -> None:
    fleet = Fleet(RoundRobin(), 2.0)
    old, older = _speaker(5), _speaker(4)
    assert fleet.refuse(old, "why", 0.0)
    assert not fleet.refuse(old, "so", 6.0)
    assert fleet.refuse(older, "why", 6.0)
    _judge(fleet, 8.0)
    assert fleet.refused == {"v5": "so", "v4": "why"}
    fleet.refuse(older, "why", 9.0)
    _judge(fleet, 17.0)
    assert fleet.refused == {"v4": "why"}


def test_only_so_many_are_named() -> None:
    fleet = Fleet(RoundRobin(), 2.0)
    for number in range(2 * MAX_REFUSED):
        fleet.refuse(_speaker(number), "why", 0.0)
    assert len(fleet.refused) == MAX_REFUSED


def test_a_draining_worker_gets_nothing_new() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute", draining=True), 0.5)
    assert not fleet.ready
    assert len(fleet) == 3


def test_an_ill_worker_gets_requests_only_where_all_are_ill() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "other"), 0.0)
    group = fleet.group("demo")
    assert group is not None

    def chosen() -> set[str]:
        return {fleet.place(group, "compute", 0.5).name for _ in range(4)}

    fleet.alive(_alive("compute", "compute", trouble="non-finite logits"), 0.5)
    assert (chosen(), fleet.healthy, fleet.ready) == ({"other"}, True, True)
    fleet.alive(_alive("compute", "other", trouble="slow steps"), 0.5)
    assert (chosen(), fleet.healthy, fleet.ready) == ({"compute", "other"}, False, True)
    fleet.alive(_alive("compute", "compute"), 0.5)
    assert (chosen(), fleet.healthy) == ({"compute"}, True)


def test_a_silent_compute_is_dead_after_the_longest_step_it_declared() -> None:
    fleet = _fleet()
    assert dict(_judge(fleet, 4.9)) == {"tokenizer.1": "dead", "detokenizer.1": "dead"}
    assert _judge(fleet, 5.2, 5.0) == [("compute.1", "dead")]
    assert len(fleet) == 0


def test_any_mail_renews_the_lease() -> None:
    fleet = _fleet(stall_after_s=1.0)
    _judge(fleet, 1.9)
    fleet.heard("compute.1", 1.9)
    assert dict(_judge(fleet, 3.0, 2.0)) == {"tokenizer.1": "dead", "detokenizer.1": "dead"}


def test_a_worker_that_gets_no_further_is_hung_and_stays_out_until_it_does() -> None:
    fleet = _fleet()
    busy: dict[str, Any] = {"open_counters": int64s([1]), "progress": 7}
    lapses = []
    for tick in range(70):
        if tick % 5 == 0:
            for service in SERVICES:
                fleet.alive(_alive(service, service, **busy), tick / 10)
        lapses += [(lapse.peer.instance_id, lapse.reason) for lapse in fleet.judge(tick / 10)]
    assert lapses == [(f"{service}.1", "hung") for service in SERVICES]
    fleet.alive(_alive("compute", "compute", **busy), 7.0)
    assert fleet.worker("compute.1") is None
    fleet.alive(_alive("compute", "compute", **{**busy, "progress": 8}), 7.5)
    assert fleet.worker("compute.1") is not None
    fleet.alive(_alive("tokenizer", "tokenizer", progress=7), 7.5)  # it has nothing left to do
    assert fleet.worker("tokenizer.1") is not None


def test_an_idle_worker_does_not_hang() -> None:
    fleet = _fleet()
    for tick in range(100):
        if tick % 5 == 0:
            for service in SERVICES:
                fleet.alive(_alive(service, service), tick / 10)
        assert fleet.judge(tick / 10) == []


def test_a_new_life_at_the_same_endpoint_replaces_the_old_one() -> None:
    fleet = _fleet()
    assert fleet.alive(_alive("compute", "compute", life=2), 0.5) == [
        Address("mem://compute", "compute.1")
    ]
    assert fleet.alive(_alive("compute", "compute", life=2), 1.0) == []
    assert fleet.worker("compute.1") is None
    assert len(fleet) == 3


def test_a_late_heartbeat_of_a_replaced_worker_does_not_replace_the_live_one() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute", life=2), 0.5)
    assert fleet.has_replaced("compute.1")
    assert fleet.alive(_alive("compute", "compute", life=1, progress=2), 0.6) == []
    assert fleet.worker("compute.1") is None
    assert fleet.worker("compute.2") is not None
    assert not fleet.has_replaced("compute.2")


def test_a_replaced_worker_stays_out_also_when_its_successor_is_gone() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute", life=2), 0.5)
    fleet.remove("compute.2", 0.5, "dead")
    fleet.alive(_alive("compute", "compute", life=1), 0.6)
    assert fleet.missing == ("compute",)
    fleet.alive(_alive("compute", "compute", life=2), 0.7)
    assert fleet.ready


def test_a_bounded_number_of_replaced_workers_is_remembered() -> None:
    fleet = _fleet()
    for life in range(2, MAX_REPLACED + 3):
        fleet.alive(_alive("compute", "compute", life=life), 0.5)
    remembered = [fleet.has_replaced(f"compute.{life}") for life in range(1, MAX_REPLACED + 3)]
    assert remembered == [False] + [True] * MAX_REPLACED + [False]
    assert len(fleet) == 3


def test_a_silent_worker_is_probed_once_a_second_and_used_last() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "other"), 2.0)
    group = fleet.group("demo")
    assert group is not None
    assert fleet.to_probe(0.9) == []
    probed = [each.address.instance_id for each in fleet.to_probe(2.5)]
    assert probed == ["tokenizer.1", "compute.1", "detokenizer.1"]
    assert fleet.to_probe(2.9) == []
    assert len(fleet.to_probe(3.6)) == 4
    chosen = {fleet.place(group, "compute", 3.6).address.instance_id for _ in range(3)}
    assert chosen == {"other.1"}
    assert fleet.place(group, "tokenizer", 3.6).address.instance_id == "tokenizer.1"


def test_what_was_placed_since_the_last_heartbeat_counts_as_load() -> None:
    fleet = Fleet(LeastLoad(), lease_s=2.0)
    for name in ("a", "b"):
        fleet.alive(_alive("compute", name, load=Load(1, 1, 8)), 0.0)
    fleet.alive(_alive("compute", "idle", load=Load(0, 0, 8)), 0.0)
    (group,) = fleet.groups()
    chosen = [fleet.place(group, "compute", 0.1).address.instance_id for _ in range(5)]
    assert chosen[:2] == ["idle.1", "idle.1"]
    assert set(chosen[2:]) == {"a.1", "b.1", "idle.1"}


def test_the_last_but_one_heartbeat_is_remembered() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute"), 0.5)
    fleet.alive(_alive("compute", "compute"), 1.0)
    assert fleet.beaten_since_s("compute.1") == 0.5
    assert fleet.beaten_since_s("gone.1") == float("inf")


def test_a_heartbeat_over_unread_mail_proves_nothing_of_what_it_does_not_list() -> None:
    fleet = _fleet()
    fleet.alive(_alive("detokenizer", "behind", caught_up=False), 0.5)
    fleet.alive(_alive("detokenizer", "behind"), 1.0)
    fleet.alive(_alive("detokenizer", "behind", caught_up=False), 1.5)
    assert fleet.beaten_since_s("behind.1") == 0.0
    fleet.alive(_alive("detokenizer", "behind"), 2.0)
    assert fleet.beaten_since_s("behind.1") == 1.0


@pytest.mark.parametrize("service", SERVICES)
def test_silence_has_a_lease_of_its_own_where_the_loop_never_stands_still(
    service: ServiceName,
) -> None:
    """Work on one request may take a tokenizer 40 s; its children do it, and it says so."""
    fleet = _fleet(stall_after_s=40.0)
    others = [name for name in SERVICES if name != service]
    expired = []
    for tick in range(30):
        for name in others:
            fleet.alive(_alive(name, name, stall_after_s=40.0), tick / 10)
        expired += [each.peer.instance_id for each in fleet.judge(tick / 10)]
    assert expired == ([] if service == "compute" else [f"{service}.1"])


def test_a_tokenizer_at_work_on_a_long_prompt_is_not_hung() -> None:
    fleet = _fleet(stall_after_s=40.0)
    for tick in range(390):
        for name in SERVICES:
            message = _alive(name, name, stall_after_s=40.0, open_counters=int64s([1]))
            fleet.alive(message, tick / 10)
        assert fleet.judge(tick / 10) == []


def test_a_replica_that_dies_again_and_again_is_left_alone_where_there_is_another() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute2"), 0.0)
    for life in range(2, 2 + MAX_FAILURES):  # each replaces the former one
        fleet.alive(_alive("compute", "compute", life), life - 1.0 - MAX_FAILURES)
    group = fleet.group("demo")
    assert group is not None

    def placed(now_s: float) -> set[str]:
        return {fleet.place(group, "compute", now_s).name for _ in range(4)}

    assert placed(1.0) == {"compute2"}
    assert placed(0.1 + FIRST_PAUSE_S) == {"compute", "compute2"}, "a trial"
    assert placed(0.2 + FIRST_PAUSE_S) == {"compute2"}
    alone = group.without({"compute2.1"})
    assert fleet.place(alone, "compute", 0.3 + FIRST_PAUSE_S).name == "compute"


def test_a_replica_is_left_alone_from_when_its_death_is_found_not_from_its_last_words() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute2"), 0.0)
    for life in range(1, 1 + MAX_FAILURES):
        fleet.alive(_alive("compute", "compute", life), 0.0)
        fleet.remove(f"compute.{life}", FIRST_PAUSE_S - MAX_FAILURES + life, "dead")
    assert not fleet.breakers.allows("mem://compute", 1.9 * FIRST_PAUSE_S)


def test_what_is_avoided_is_taken_only_where_there_is_nothing_else() -> None:
    fleet = _fleet()
    fleet.alive(_alive("detokenizer", "detokenizer2"), 0.0)
    (group,) = fleet.groups()

    def chosen(*avoided: str) -> set[str]:
        routes = [fleet.route(group, REPLY, 0.0, "", avoided)[0] for _ in range(4)]
        return {route.detokenizer.instance_id for route in routes}

    assert chosen("detokenizer.1") == {"detokenizer2.1"}
    assert chosen("detokenizer.1", "detokenizer2.1") == {"detokenizer.1", "detokenizer2.1"}


def test_a_worker_that_ends_as_it_said_has_not_failed() -> None:
    fleet = _fleet()
    fleet.alive(_alive("compute", "compute2"), 0.0)
    for life in range(2, 2 + 2 * MAX_FAILURES):
        fleet.alive(_alive("compute", "compute", life - 1, draining=True), 0.0)
        fleet.alive(_alive("compute", "compute", life), 0.0)
    group = fleet.group("demo")
    assert group is not None
    assert {fleet.place(group, "compute", 0.0).name for _ in range(4)} == {"compute", "compute2"}
