"""The requests that a compute service asks itself before it takes any."""

from __future__ import annotations

from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.engine import Engine
from services.compute.scheduler.scheduler import Scheduler


def warm_up(engine: Engine, scheduler: Scheduler) -> None:
    """Run a greedy and a sampled request, so that the first client does not pay for first times."""
    for counter, temperature in enumerate((0.0, 1.0)):
        request = Generate(
            attempt=AttemptId("warm-up", counter),
            detokenizer=Address("", ""),
            prompt_ids=int32s((0, 0, 0)).tobytes(),  # below one page: the prefix tree keeps none
            output_ids=int32s(),
            sampling=SamplingParams(max_tokens=4, seed=0, temperature=temperature, ignore_eos=True),
            header=b"",
            admitted_at_s=0.0,
        )
        scheduler.add_request(request, 0.0)
    while scheduler.has_work() or engine.num_in_flight:
        if not engine.launch() and not engine.collect(force=True):
            break  # a policy that waits for its window: it has been warmed up enough
    scheduler.end_all(lambda request: True, "aborted", 0.0)
    scheduler.drain_outputs()  # for no client
    engine.forget()
