"""The three scheduling policies."""

from __future__ import annotations

from services.compute.scheduler.policies import (
    BatchView,
    DecodeFirst,
    PrefillFirst,
    Quota,
    StaticBatch,
    make_policy,
)
from services.compute.scheduler.state import SchedulerSettings
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.scheduler_loop import Loop, make_request


def view(num_new: int = 0, num_running: int = 0, started: int = 0) -> BatchView:
    """What a policy sees."""
    return BatchView(
        num_running=num_running,
        num_new=num_new,
        num_resumable=0,
        num_started_total=started,
        max_num_seqs=4,
        max_prefill_tokens=64,
    )


def sizes(quotas: tuple[Quota, ...]) -> list[int]:
    """How many newcomers may start."""
    return [quota.new_sequences for quota in quotas]


def test_each_policy_has_its_name() -> None:
    assert isinstance(make_policy("decode_first", 0.1), DecodeFirst)
    assert isinstance(make_policy("prefill_first", 0.1), PrefillFirst)
    assert isinstance(make_policy("static_batch", 0.1), StaticBatch)


def test_decode_first_mixes_prompts_and_decode_rows() -> None:
    loop = Loop(make_spec(), policy=DecodeFirst())
    loop.add(make_request(0))
    loop.step()
    loop.add(make_request(1, (20, 21, 22)))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [1, 3]


def test_prefill_first_never_mixes() -> None:
    loop = Loop(make_spec(), SchedulerSettings(max_prefill_tokens=4), PrefillFirst())
    for counter in range(3):
        loop.add(make_request(counter, tuple(range(2 + counter, 9 + counter))))
        loop.step()
    loop.run()
    loop.check_finished()
    mixed = [
        plan
        for plan in loop.plans
        if 0 < plan.num_decode_rows < plan.num_rows  # a last single token is a row of both kinds
    ]
    assert mixed == []


def test_prefill_first_lets_newcomers_go_before_those_that_decode() -> None:
    loop = Loop(make_spec(), policy=PrefillFirst())
    loop.add(make_request(0))
    loop.step()
    loop.add(make_request(1, (20, 21, 22)))
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [3]


def test_prefill_first_decodes_while_newcomers_do_not_fit() -> None:
    loop = Loop(make_spec(num_pages=8), policy=PrefillFirst())
    loop.add(make_request(0, tuple(range(2, 18)), 8))
    loop.add(make_request(1, tuple(range(10, 26)), 8))
    loop.run()
    loop.check_finished()


def prefill_first_short_of_pages() -> Loop:
    """One row is held, a newcomer waits, and what is in flight will free four pages."""
    loop = Loop(
        make_spec(num_pages=7), SchedulerSettings(prefix_cache=False), policy=PrefillFirst()
    )
    loop.add(make_request(0, tuple(range(2, 14)), 8))
    loop.add(make_request(1, tuple(range(12, 25)), 1))
    assert loop.launch() is not None
    loop.add(make_request(2, tuple(range(2, 10)), 4))
    assert loop.launch() is None
    return loop


def test_a_held_row_gets_its_page_before_newcomers_do() -> None:
    loop = prefill_first_short_of_pages()
    loop.collect()
    plan = loop.launch()
    assert plan is not None
    assert plan.q_start.tolist() == [12]
    loop.run()
    loop.check_finished()
    assert loop.scheduler.stats().preemptions_total == 0


def test_newcomers_go_on_when_the_held_row_is_aborted() -> None:
    loop = prefill_first_short_of_pages()
    loop.abort(0)
    plan = loop.launch()
    assert plan is not None
    assert plan.q_len.tolist() == [8]
    loop.run()
    loop.check_finished()


def test_a_static_batch_gathers_for_its_window() -> None:
    policy = StaticBatch(window_s=1.0)
    assert policy.quotas(view(), 0.0) == ()
    assert policy.wake_at_s() is None
    assert policy.quotas(view(num_new=1), 10.0) == ()
    assert policy.wake_at_s() == 11.0
    assert policy.quotas(view(num_new=2), 10.5) == ()
    assert sizes(policy.quotas(view(num_new=3), 11.0)) == [3]
    assert policy.wake_at_s() is None


def test_a_full_static_batch_does_not_wait() -> None:
    policy = StaticBatch(window_s=1.0)
    assert sizes(policy.quotas(view(num_new=9), 0.0)) == [4]
    assert sizes(policy.quotas(view(num_new=7, num_running=2, started=2), 0.0)) == [2]


def test_nobody_joins_a_static_batch_that_runs() -> None:
    policy = StaticBatch(window_s=1.0)
    assert sizes(policy.quotas(view(num_new=9), 0.0)) == [4]
    assert sizes(policy.quotas(view(num_new=5, num_running=3, started=4), 0.1)) == [0]


def test_the_window_of_the_next_static_batch_begins_while_one_runs() -> None:
    policy = StaticBatch(window_s=1.0)
    policy.quotas(view(num_new=4), 0.0)
    policy.quotas(view(num_new=1, num_running=4, started=4), 0.5)
    assert policy.wake_at_s() is None, "time alone does not end the batch that runs"
    assert sizes(policy.quotas(view(num_new=1, started=4), 1.5)) == [1]


def test_static_batches_run_one_after_the_other_to_the_end() -> None:
    loop = Loop(make_spec(), policy=StaticBatch(window_s=0.05))
    for counter in range(3):
        loop.add(make_request(counter, max_tokens=4 + counter))
    assert not loop.step()
    loop.now_s = 0.05
    assert loop.step()
    loop.add(make_request(3, max_tokens=2))
    while loop.scheduler.stats().num_running:
        assert loop.scheduler.stats().num_waiting == 1
        loop.step()
        loop.now_s += 0.05
    ended_at_s = loop.now_s
    loop.run()
    loop.check_finished()
    assert loop.now_s == ended_at_s, "the window of the second batch had passed while the first ran"


def test_a_preempted_member_of_a_static_batch_comes_back_into_it() -> None:
    loop = Loop(make_spec(num_pages=10), policy=StaticBatch(window_s=0.0))
    loop.add(make_request(0, tuple(range(2, 15)), 20))
    loop.add(make_request(1, tuple(range(12, 25)), 20))
    loop.step()
    loop.add(make_request(2, (2,), 2))
    loop.run()
    loop.check_finished()
    assert loop.scheduler.stats().preemptions_total > 0
