"""What masks cost the process that makes them: `python -m benchmarks.masks [--steps 300]`.

The mask worker in this process, without an engine: 64 sequences of `benchmarks.structured`'s schema
take a random token each, of those that its mask allows, and get their next masks. Prints what an
order takes, and a digest of all masks, by which two checkouts can be compared.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from benchmarks.stack import scratch_folder
from benchmarks.structured import NUM_STREAMS, ORDER, WIDE_VOCABULARY, save_wide_folder
from common.messages.sampling import GrammarSpec
from common.model_folder import eos_token_ids
from services.compute.grammar import mask_worker
from services.compute.grammar.backend import GrammarBackend
from services.compute.grammar.protocol import (
    AcceptTokens,
    GrammarSettings,
    MaskMemory,
    StartSequence,
)

WARM_UP = 20  # steps
MAX_TOKENS = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    with scratch_folder() as scratch:
        print(measure(save_wide_folder(scratch / "wide"), parser.parse_args().steps))


def measure(folder: Path, num_steps: int) -> str:
    """A line with the processor time and the time of one order, milliseconds."""
    eos = eos_token_ids(folder)
    settings = GrammarSettings(
        folder=str(folder), vocab_size=WIDE_VOCABULARY, eos_token_ids=eos, num_slots=NUM_STREAMS
    )
    memory, backend = MaskMemory.create(NUM_STREAMS, WIDE_VOCABULARY), GrammarBackend(settings)
    mask_worker.SLOW_S = 1.0  # none goes to another process, however busy the machine is
    worker = mask_worker.MaskWorker(settings, backend, memory, lambda report: None, 0, None)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(ORDER))
    backend.compile(grammar)
    for slot in range(NUM_STREAMS):
        spec = GrammarSpec(grammar)
        worker.take(StartSequence(slot, 1, spec, eos, (), 0, False, MAX_TOKENS, ()))
    dice, digest = np.random.default_rng(5), hashlib.sha256()
    forced: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
    taken = []
    gc.freeze()
    for index in range(num_steps):
        for slot, _, _, _, count, *tokens in memory.named().tolist():
            forced[slot] += tokens[:count]
        bits_NV = np.unpackbits(memory.masks_PNW[0].view(np.uint8), axis=1, bitorder="little")
        digest.update(bits_NV.tobytes())
        rows = [
            (slot, 1, index, ahead.pop(0) if ahead else int(dice.choice(np.flatnonzero(bits_V))))
            for slot, (ahead, bits_V) in enumerate(zip(forced, bits_NV, strict=True))
        ]
        began_s, used_s = time.perf_counter(), time.thread_time()
        worker.take(AcceptTokens(np.array(rows, dtype=np.int32)))
        taken.append((time.thread_time() - used_s, time.perf_counter() - began_s))
    used, took = 1e3 * np.sort(taken[WARM_UP:], axis=0).T
    return (
        f"{NUM_STREAMS} masks: processor time {used[: len(used) // 10].mean():.3f} ms in the least "
        f"tenth of {len(used)} steps, {np.median(used):.3f} in the median, of which the clock says "
        f"{np.median(took):.3f}; masks {digest.hexdigest()[:12]}"
    )


if __name__ == "__main__":
    main()
