"""Answers in one piece, and the usage of several choices."""

from __future__ import annotations

import asyncio

from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Candidate, Logprobs, TokenLogprob
from services.router.answer import AnswerCollector, UsageTally
from tests.text_rows import columns

TOKEN = TokenLogprob(Candidate(1, "a", b"a", -0.5), ())


def _ended(prompt: int, cached: int, completion: int) -> Ending:
    return Ending("stop", Usage(prompt, cached, completion))


def _future() -> asyncio.Future[Failure | None]:
    return asyncio.get_running_loop().create_future()


async def test_the_last_choice_completes_the_response() -> None:
    sink = AnswerCollector(2, 2, False, _future())
    sink.delta(1, "x")
    sink.finished(1, _ended(5, 4, 1))
    sink.delta(0, "a")
    sink.delta(0, "")
    sink.delta(0, "b")
    assert not sink.done.done()
    sink.finished(0, _ended(5, 0, 2))
    assert sink.done.result() is None
    assert [answer.text for answer in sink.answers()] == ["ab", "x"]
    assert [answer.logprobs for answer in sink.answers()] == [None, None]
    assert sink.usage == Usage(5, 0, 3)
    assert sink.finish_reasons == ["stop", "stop"]


async def test_logprobs_are_there_even_if_empty_where_they_were_asked_for() -> None:
    sink = AnswerCollector(1, 1, True, _future())
    sink.finished(0, _ended(5, 0, 0))
    assert sink.answers()[0].logprobs == Logprobs()
    sink = AnswerCollector(1, 1, True, _future())
    sink.delta(0, "a", columns(TOKEN))
    sink.finished(0, _ended(5, 0, 1))
    assert sink.answers()[0].logprobs == columns(TOKEN)


async def test_a_failure_ends_the_response_and_a_cancelled_one_does_not_mind() -> None:
    sink = AnswerCollector(2, 2, False, _future())
    failure = Failure(500, "x", "x")
    sink.failed(failure)
    assert sink.done.result() == failure
    gone = AnswerCollector(1, 1, False, _future())
    gone.done.cancel()
    gone.finished(0, _ended(5, 0, 0))
    gone.failed(failure)


def test_a_prompt_counts_once_and_completions_all() -> None:
    tally = UsageTally(2)
    for choice, usage in enumerate([(5, 0, 1), (5, 4, 2), (7, 3, 3), (7, 6, 4)]):
        tally.add(choice, Usage(*usage))
    assert tally.total() == Usage(12, 3, 10)
