"""A first request of our own, so that the first of a client does not pay for first times."""

from __future__ import annotations

from common.messages.address import Address, AttemptId
from common.messages.sampling import SamplingParams
from services.compute.engine import Engine
from services.compute.scheduler.protocol import Prompt, Request, Scheduler
from services.compute.step import NO_IDS

_PROMPT = Prompt.of((0, 0, 0))  # below one page, so that nothing of it stays in the prefix tree


def warm_up(engine: Engine, scheduler: Scheduler) -> None:
    """Run a greedy and a sampled request through prefill and a few decode steps."""
    for counter, temperature in enumerate((0.0, 1.0)):
        sampling = SamplingParams(max_tokens=4, seed=0, temperature=temperature, ignore_eos=True)
        request = Request(
            attempt=AttemptId("warm-up", counter),
            detokenizer=Address("", ""),
            prompt=_PROMPT,
            output_ids=NO_IDS,
            sampling=sampling,
            header=b"",
        )
        scheduler.add(request, 0.0)
    while scheduler.has_work() or engine.num_in_flight:
        if not engine.launch() and not engine.collect(force=True):
            break  # a policy that waits for its window: it has been warmed up enough
    scheduler.end_all(lambda request: True, "aborted", 0.0)  # nobody is to be sent their tokens
    scheduler.take_news()
    engine.forget()
