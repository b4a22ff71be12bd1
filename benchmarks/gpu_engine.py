"""What the host needs for a step of decode rows: `python -m benchmarks.gpu_engine`.

Scheduler, engine and runner in a process of their own, without clients, so that nothing else fills
the host's caches: what a step costs the host by itself. `benchmarks.gpu --workloads S` is the same
batch behind the whole server.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path

import numpy as np

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.stack import scratch_folder
from common.config import ModelSettings
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.actor import pack_outputs
from services.compute.config import ComputeSettings
from services.compute.device import ModelDevice
from services.compute.engine import Engine
from services.compute.warm_up import warm_up

NEEDS_GPU = True  # `python -m benchmarks` leaves it out where there is none
NUM_TOKENS, PROMPT_TOKENS = 512, 64
PHASES = {
    "plan": ("plan_s", "launch_s"),
    "launch": ("launch_s", "launched_s"),
    "commit": ("commit_s", "committed_s"),
    "send": ("send_s", "sent_s"),
}


def request(counter: int) -> Generate:
    """A greedy one of random ids, to its full length."""
    dice = random.Random(counter)
    prompt = int32s(dice.choices(range(1000, 30_000), k=PROMPT_TOKENS))
    return Generate(
        attempt=AttemptId("benchmark", counter),
        detokenizer=Address("inproc://detokenizer", "0"),
        prompt_ids=prompt.tobytes(),
        output_ids=int32s(),
        sampling=SamplingParams(max_tokens=NUM_TOKENS, seed=1, temperature=0.0, ignore_eos=True),
        header=b"",
        admitted_at_s=0.0,
    )


def fail(error: Exception, _: object) -> None:
    raise error


def measure(folder: Path, settings: ComputeSettings, num_rows: int) -> str:
    """A line with the medians of the steps of so many rows, microseconds."""
    device = ModelDevice(ModelSettings(path=str(folder)), settings)
    runner, scheduler, *_ = device.load()
    engine = Engine(scheduler, runner, settings.in_flight_steps, time.monotonic, fail)
    warm_up(engine, scheduler)
    gc.collect()
    gc.disable()
    for counter in range(num_rows):
        scheduler.add_request(request(counter), 0.0)
    step_id = 0
    while scheduler.has_work() or engine.num_in_flight:
        if engine.launch() and engine.has_room:
            continue
        engine.collect(force=True)
        began_s, step_id = time.monotonic(), step_id + 1
        pack_outputs(step_id, scheduler.drain_outputs())
        engine.sent(began_s, 0.0)
    records = engine.records.last(NUM_TOKENS)
    steady = records[(records["decode_rows"] == num_rows) & (records["prefill_tokens"] == 0)]
    parts = [1e6 * (steady[end] - steady[begin]) for begin, end in PHASES.values()]
    together = np.nansum(parts, axis=0)
    medians = ", ".join(
        f"{name} {np.nanmedian(part):.0f}" for name, part in zip(PHASES, parts, strict=True)
    )
    device_ms = 1e3 * np.nanmedian(steady["device_end_s"] - steady["device_start_s"])
    runner.close()
    return (
        f"{num_rows} rows, {len(steady)} steps: {medians}; together {np.median(together):.0f} us, "
        f"mean {np.mean(together):.0f}; device {device_ms:.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    settings = ComputeSettings(
        device=arguments.device, dtype="bfloat16", load_format="dummy", max_model_len=4096
    )
    with scratch_folder() as scratch:
        folder = make_folder(scratch / arguments.model, SHAPES[arguments.model])
        for rows in arguments.rows.split(","):
            print(f"{arguments.model}, {measure(folder, settings, int(rows))}", flush=True)


if __name__ == "__main__":
    main()
