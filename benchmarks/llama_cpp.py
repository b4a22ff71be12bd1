"""How fast quantised models are on the CPU, against llama.cpp: one file, threads and machine.

    python -m benchmarks.llama_cpp [--rounds N] [--threads N] [--type Q4_0] [--file MODEL.gguf]

Ours is a whole server, asked over HTTP by a client beside it on the same cores. llama.cpp decodes
inside this process (package llama-cpp-python), in batches of one token per stream and without a
server. They take turns; each generates from prompts of its own, greedily. Speed counts from a
stream's first token on.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType

import numpy as np

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.report import Report
from benchmarks.stack import Stack, scratch_folder
from services.bench.client import Clients, OfferedLoad, ServerAddress
from services.bench.workloads import BenchRequest, completion
from tests.gguf_files import GgufOptions, write_gguf

SHAPE = ModelShape(32_000, 768, 2048, 12, 12, 4, 2048, initializer_range=0.02)
TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
STREAMS = (1, 16)
PROMPT_TOKENS, NEW_TOKENS = 32, 128
ROOM_TOKENS = 256  # of a stream
BATCH_TOKENS = 512
WITHIN_S = 300.0


def write_files(folder: Path, llama: ModuleType, types: Sequence[str]) -> dict[str, Path]:
    """Write the model in bfloat16, and have llama.cpp make the other types of it."""
    source = save_folder(folder / "model", SHAPE)
    _pad_vocabulary(source, SHAPE.vocab_size)
    plain = write_gguf(source, folder / "BF16.gguf", GgufOptions("BF16"))
    files = {}
    for name in types:
        files[name] = plain
        if name != "BF16":
            files[name] = folder / f"{name}.gguf"
            options = llama.llama_model_quantize_default_params()
            options.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{name}")
            ends = (os.fsencode(plain), os.fsencode(files[name]))
            if llama.llama_model_quantize(*ends, ctypes.byref(options)):
                raise SystemExit(f"llama.cpp could not write {name}")
    return files


def _pad_vocabulary(folder: Path, size: int) -> None:
    """Add tokens that no text has: a GGUF file must name as many as the embedding has rows."""
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    vocab = described["model"]["vocab"]
    first = max(*vocab.values(), *(token["id"] for token in described["added_tokens"])) + 1
    vocab |= {f"unused{number}": number for number in range(first, size)}
    path.write_text(json.dumps(described))


class LlamaCpp:
    """llama.cpp in this process."""

    def __init__(self, llama: ModuleType, file: Path, num_streams: int, num_threads: int) -> None:
        self._llama, self._num_streams = llama, num_streams
        of_model = llama.llama_model_default_params()
        # With its weights in the order of AMX (the default) 0.3.36 ends in a segmentation fault.
        of_model.use_extra_bufts = False
        self._model = llama.llama_model_load_from_file(os.fsencode(file), of_model)
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_seq_max = num_streams * ROOM_TOKENS, num_streams
        options.n_batch = options.n_ubatch = BATCH_TOKENS
        options.n_threads = options.n_threads_batch = num_threads
        self._context = llama.llama_init_from_model(self._model, options)
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def tokens_per_s(self, prompts: Sequence[Sequence[int]]) -> float:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        last = [
            self._decode([(t, at, row) for at, t in enumerate(prompt)], [len(prompt) - 1])[0]
            for row, prompt in enumerate(prompts)
        ]
        began_s = time.perf_counter()
        for step in range(NEW_TOKENS):
            entries = [(t, len(prompts[row]) + step, row) for row, t in enumerate(last)]
            last = self._decode(entries, range(len(entries)))
        return len(prompts) * NEW_TOKENS / (time.perf_counter() - began_s)

    def _decode(self, entries: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Compute tokens at positions of streams; returns what follows those at `wanted`."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for at, (token, position, stream) in enumerate(entries):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, stream
            batch.logits[at] = at in wanted
        if self._llama.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode")
        pointers = (self._llama.llama_get_logits_ith(self._context, at) for at in wanted)
        return [int(np.ctypeslib.as_array(p, (self._vocab_size,)).argmax()) for p in pointers]

    def close(self) -> None:
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)


class Ours:
    """`slipstream serve FILE.gguf`."""

    def __init__(self, file: Path, num_threads: int) -> None:
        self._name = file.stem
        settings = {"compute.num_threads": num_threads, "compute.max_num_seqs": max(STREAMS)}
        options = ("--device", "cpu", "--dtype", "bfloat16")
        self._stack = Stack(file, *options, settings=settings).wait_ready()

    def tokens_per_s(self, prompts: Sequence[Sequence[int]]) -> float:
        to = ServerAddress("127.0.0.1", self._stack.port)
        asks = [completion(self._name, BenchRequest(list(p), NEW_TOKENS)) for p in prompts]
        requests = tuple(to.post("/v1/completions", ask) for ask in asks)
        outcome = Clients(to, OfferedLoad(requests, len(prompts)), 1).run(WITHIN_S)
        if errors := [reply.error for reply in outcome.replies if reply.error]:
            raise SystemExit(errors[0])
        return sum(
            (reply.usage["completion_tokens"] - 1) / (reply.last_s - reply.first_s)
            for reply in outcome.replies
        )

    def close(self) -> None:
        self._stack.close()


def measure(llama: ModuleType, file: Path, rounds: int, num_threads: int) -> list[list[object]]:
    """A row for each number of streams; the first round only warms up."""
    dice, rows = random.Random(11), []
    for num_streams in STREAMS:
        with (
            closing(LlamaCpp(llama, file, num_streams, num_threads)) as theirs,
            closing(Ours(file, num_threads)) as ours,
        ):
            pairs = []
            for _ in range(rounds + 1):
                prompts = [
                    [dice.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
                    for _ in range(num_streams)
                ]
                pairs.append((theirs.tokens_per_s(prompts), ours.tokens_per_s(prompts)))
        medians = [statistics.median(side) for side in zip(*pairs[1:], strict=True)]
        ratios = sorted(b / a for a, b in pairs[1:])
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        name = f"{file.stem}, {num_streams}"
        rows.append([name, *medians, statistics.median(ratios), spread])
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--type", action="append", choices=TYPES, help="all, if not given")
    parser.add_argument("--file", type=Path, help="a file of your own")
    given = parser.parse_args()
    if importlib.util.find_spec("llama_cpp") is None:
        sys.exit("llama_cpp is missing: pip install llama-cpp-python")
    import llama_cpp

    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    rows = []
    with scratch_folder() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        types = given.type or TYPES
        files = [given.file] if given.file else write_files(folder, llama_cpp, types).values()
        for file in files:
            rows += measure(llama_cpp, file, given.rounds, given.threads)
    report = Report(
        "llama_cpp",
        "Quantised models on the CPU, against llama.cpp",
        "Ours is `slipstream serve FILE.gguf` over HTTP, with router, tokenizer, detokenizer and "
        "client on the same cores; llama.cpp decodes in the process of the benchmark, without a "
        "server. Tokens per second from each stream's first token on.",
    )
    report.text(
        f"llama-cpp-python {llama_cpp.__version__}; {given.threads} threads each, "
        f"{given.rounds} rounds by turns; prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new, "
        "greedy; "
        + (given.file.name if given.file else "12 layers of width 768, 32,000 ids, random weights")
    )
    columns = ["type, streams", "llama.cpp, tokens/s", "ours, tokens/s", "ratio", "of rounds"]
    report.table(columns, rows)
    report.write()


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _QUIET(level: int, text: bytes, data: object) -> None:
    if level >= 4:
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
