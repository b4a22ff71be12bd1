"""Newcomers with penalties, V = 128256, and what they cost the thread that drives the device.

Predicted on an H200, in a graph: a row of counts is 0.5 MB to write, so 64 newcomers 33 MB in 9 µs
at 3.7 TB/s; ids are a few hundred KB and atomics in the L2 cache. With the second launch and its
chain of dependent loads 6 / 14 / 42 µs for 1 / 64 / 256 newcomers of 220 ids; one of 100,000 ids
20 to 40 µs.

The host, by the same sizes: settings to words, packing into pinned memory, one copy, one launch.
64 newcomers of 220 ids 0.3 ms, of 4,000 ids 0.5 ms, whatever came before; it was 40 to 160 µs for
each, and pinned memory to be made for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.kernels.case import Case
from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling.enter_slots import enter_slots
from services.compute.kernels.sampling.slot_entries import SlotEntry, pack_entries, packed_size
from services.compute.kernels.step.slot_words import NUM_WORDS
from services.compute.kernels.step.step_buffers import Resident, StepInputs
from services.compute.runner.cuda.staging import Staging
from services.compute.runner.cuda.stream import GraphStream
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.sampling.slots import slots_of
from services.compute.step import SlotDelta

VOCAB_SIZE = 128256
NUM_SLOTS = 256
MAX_POSITIONS = 131072
SIZES = ((1, 220), (64, 220), (64, 4000), (256, 220), (1, 100_000))
PENALTIES = SamplingParams(
    max_tokens=100,
    seed=1,
    presence_penalty=0.5,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
)
ROUNDS = 30


def cases() -> Iterator[Case]:
    """Each number of newcomers; before its line the host's part of it is printed."""
    device = torch.device("cuda")
    resident = Resident.make(NUM_SLOTS, 4, NUM_WORDS, device)
    inputs = StepInputs.make(NUM_SLOTS, NUM_SLOTS, device)
    sampler = DeviceSampler(VOCAB_SIZE, resident, inputs)
    for count, num_ids in SIZES:
        deltas = newcomers(count, num_ids)
        print(host_line(sampler, deltas, device), flush=True)
        packed = on_device(slots_of(deltas, VOCAB_SIZE)[1], device)
        shaped, tables = sampler._shaped, sampler._tables
        run = partial(enter_slots, packed, shaped.said_NV, tables)
        size = 4.0 * count * (VOCAB_SIZE + 2 * num_ids)
        yield Case(f"enter_slots {count} of {num_ids} ids", [run], size)


def newcomers(count: int, num_ids: int) -> list[SlotDelta]:
    """Each with a prompt of its own."""
    draw = np.random.default_rng(0)
    return [
        SlotDelta(
            slot, 1, PENALTIES, 0, (2,), draw.integers(0, VOCAB_SIZE, num_ids, dtype=np.int32)
        )
        for slot in range(count)
    ]


def on_device(entries: list[SlotEntry], device: torch.device) -> torch.Tensor:
    """The upload of these entries."""
    out = np.zeros(packed_size(MAX_POSITIONS), dtype=np.int32)
    pack_entries(entries, out)
    return torch.from_numpy(out).to(device)


def host_line(sampler: DeviceSampler, deltas: list[SlotDelta], device: torch.device) -> str:
    """Microseconds of `forward` that newcomers take before the step is launched."""
    packed = torch.zeros(packed_size(MAX_POSITIONS), dtype=torch.int32, device=device)
    before = torch.cuda.current_stream()
    stream = GraphStream(device)
    enter = partial(sampler.enter, packed)
    stream.rehearse(enter)
    stream.record("enter", enter)
    staging = Staging(packed, 4, stream.synchronize)
    host_us = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        entries = slots_of(deltas, VOCAB_SIZE)[1]
        upload = staging.upload(pack_entries(entries, staging.buffer()))
        stream.replay("enter")
        host_us.append((time.perf_counter() - began_s) * 1e6)
        stream.synchronize()
        staging.done(upload)
    stream.forget()
    torch.cuda.set_stream(before)
    return (
        f"host, {len(deltas)} newcomers of {len(deltas[0].prompt_ids)} ids: first "
        f"{host_us[0]:.0f} µs, then median {statistics.median(host_us[1:]):.0f} µs, "
        f"largest {max(host_us[1:]):.0f} µs"
    )
