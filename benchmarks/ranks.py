"""What the ranks of a split model cost each other on the GPUs of one host.

    python -m benchmarks.ranks [--ranks 2] [--width 8192]

Launches in a graph, microseconds each: the sum over ranks with the norm behind it in one launch
(one-shot), the sum alone written to all (two-shot), NCCL's, the logits of all ranks side by side,
the bests of their parts instead, an expert of Qwen3-30B-A3B that goes from rank to rank, and keys
and values of an 8B layer that each rank has of some tokens. All results are compared with
references first.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.compute.distributed.symmetric import SymmetricBlock
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.ranks.rank_entries import StagedEntries, exchange_entries, turn_bytes
from services.compute.kernels.ranks.rank_rows import (
    MAX_PROGRAMS,
    add_up,
    rank_sum_reference,
    share_best,
    side_by_side,
)
from services.compute.kernels.rows.add_norm import add_norm, add_norm_reference
from services.compute.kernels.sampling.sample import SampleScratch
from services.compute.kernels.step.step_buffers import HEADER_INTS, NUM_OWN, NUM_TOKENS
from services.compute.layers.expert_link import SymmetricLink, handed_bytes
from services.compute.layers.weighted_layers import Norm

NEEDS_GPU = True
ROWS = (1, 8, 64, 128, 256, 1024, 8192)
VOCAB = 128_256
LAUNCHES = 40
MAX_SAMPLES = 256
KV_SHAPE, PAGE_TOKENS = (2, 8, 128), 16
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def graph_us(launch: Callable[[int], None], repeats: int = 5) -> float:
    """Of one of the launches of a graph, the fastest replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for number in range(4):
            launch(number)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(LAUNCHES):
                launch(number)
        times = []
        for _ in range(repeats + 2):
            stream.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return float(min(times[2:])) * 1000 / LAUNCHES


class Bench:
    """One rank's memory, and what its launches work on."""

    def __init__(self, rank: int, num_ranks: int, width: int, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks, self.width = rank, num_ranks, width
        device, dtype, most = torch.device("cuda", rank), torch.bfloat16, max(ROWS)
        self.part = VOCAB // num_ranks
        shapes = [((most, width), dtype)] * 2 + [((MAX_SAMPLES, self.part), torch.float32)]
        shapes.append(((MAX_SAMPLES, 4), torch.int32))
        self.block = SymmetricBlock(SymmetricBlock.num_bytes(*shapes), device, group)
        self.turns = [self.block.take((most, width), dtype) for _ in range(2)]
        self.logits = self.block.take((MAX_SAMPLES, self.part), torch.float32)
        self.words = self.block.take((MAX_SAMPLES, 4), torch.int32)
        self.scratch = SampleScratch.make(MAX_SAMPLES, VOCAB, device)
        self.norm = Norm(torch.rand(width, device=device, dtype=dtype), 1e-5)
        self.x_TE = torch.zeros(most, width, dtype=dtype, device=device)
        self.out_TE, self.plain_TE = torch.empty_like(self.x_TE), torch.randn_like(self.x_TE)
        self.logits_SV = torch.zeros(MAX_SAMPLES, VOCAB, device=device)

    def fill(self, rows: int) -> list[Tensor]:
        """Write this rank's summands, and return all ranks'."""
        parts = []
        for seed in range(self.num_ranks):
            generator = torch.Generator(self.x_TE.device).manual_seed(seed)
            shape = (rows, self.width)
            part = torch.randn(shape, generator=generator, device=self.x_TE.device)
            parts.append(part.to(self.x_TE.dtype))
        for turn in self.turns:
            turn.own[:rows].copy_(parts[self.rank])
        torch.cuda.synchronize()
        dist.barrier()
        return parts

    def one_shot(self, rows: int) -> float:
        parts = self.fill(rows)
        self.x_TE.zero_()
        x_TE, out_TE = self.x_TE[:rows], self.out_TE[:rows]

        def launch(number: int) -> None:
            add_norm(x_TE, self.block.rows(self.turns[number % 2], rows), self.norm, out_TE)

        launch(0)
        expected_x, expected = torch.zeros_like(x_TE), torch.empty_like(out_TE)
        add_norm_reference(expected_x, rank_sum_reference(parts), self.norm, expected)
        assert torch.equal(x_TE, expected_x)
        assert (expected.float() - out_TE.float()).abs().max() <= 2**-6
        return graph_us(launch)

    def two_shot(self, rows: int) -> float:
        parts = self.fill(rows)

        def launch(number: int) -> None:
            add_up(self.block.rows(self.turns[number % 2], rows))

        launch(0)
        torch.cuda.synchronize()
        assert torch.equal(self.turns[0].own[:rows], rank_sum_reference(parts))
        return graph_us(launch)

    def nccl(self, rows: int) -> float:
        return graph_us(lambda _: dist.all_reduce(self.plain_TE[:rows]))

    def norm_alone(self, rows: int) -> float:
        x_TE, delta_TE, out_TE = self.x_TE[:rows], self.plain_TE[:rows], self.out_TE[:rows]
        return graph_us(lambda _: add_norm(x_TE, delta_TE, self.norm, out_TE))

    def gather(self, rows: int) -> float:
        begins = tuple(self.part * number for number in range(self.num_ranks + 1))
        self.logits.own.fill_(self.rank + 1.0)
        torch.cuda.synchronize()
        dist.barrier()

        def launch(_: int) -> None:
            memory = self.block.memory
            side_by_side(self.logits.addresses_R, begins, self.logits_SV[:rows], memory)

        launch(0)
        for rank, part_SV in enumerate(torch.split(self.logits_SV[:rows], self.part, dim=1)):
            assert bool((part_SV == rank + 1).all())
        return graph_us(launch)

    def bests(self, rows: int) -> float:
        """Of a part of the vocabulary, cut as draws of many rows are."""
        self.scratch.best_SC.fill_(self.rank)
        self.scratch.best_id_SC.fill_(self.rank + 7)
        torch.cuda.synchronize()
        dist.barrier()

        def launch(_: int) -> None:
            share_best(self.words.addresses_R, self.scratch, rows, 8, self.block.memory)

        launch(0)
        for rank in range(self.num_ranks):
            assert bool((self.scratch.best_SC[:rows, rank] == rank).all())
            assert bool((self.scratch.best_id_SC[:rows, rank] == rank + 7).all())
        return graph_us(launch)

    def hand_on(self) -> float:
        """From rank 0 to rank 1."""
        device = self.x_TE.device
        pieces = [
            torch.full(shape, float(self.rank), dtype=torch.bfloat16, device=device)
            for shape in ((1536, 2048), (2048, 768))
        ]
        ranks: Any = SimpleNamespace(rank=self.rank, size=self.num_ranks)
        link = SymmetricLink(handed_bytes(pieces), device, ranks)

        def launch(_: int) -> None:
            link.hand_on(pieces, 0, 1)

        launch(0)
        assert all(bool((piece == (self.rank if self.rank > 1 else 0)).all()) for piece in pieces)
        return graph_us(launch)

    def exchange(self, num_own: int) -> float:
        """Of so many tokens of each rank, whose slots follow one another."""
        device, size = self.x_TE.device, self.num_ranks
        header = torch.zeros(HEADER_INTS, dtype=torch.int32, device=device)
        header[[NUM_TOKENS, NUM_OWN]] = num_own
        token_bytes = math.prod(KV_SHAPE) * 2
        piece = (2 * turn_bytes(num_own, token_bytes),)
        group = dist.group.WORLD
        assert group is not None
        num_bytes = SymmetricBlock.num_bytes((piece, torch.uint8))
        block = SymmetricBlock(num_bytes, device, group)
        addresses_R = block.take(piece, torch.uint8).addresses_R
        staged = StagedEntries(addresses_R, block.memory, num_own, token_bytes)
        parts, heads, width = KV_SHAPE
        shape = (size * num_own // PAGE_TOKENS, parts, heads, PAGE_TOKENS, width)
        pages = torch.full(shape, self.rank + 1.0, dtype=torch.bfloat16, device=device)
        slots = torch.arange(num_own, device=device) + self.rank * num_own

        def launch(_: int) -> None:
            exchange_entries(LayerPages(pages), slots, header, staged)

        launch(0)
        for rank, part in enumerate(torch.chunk(pages, size)):
            assert bool((part == rank + 1).all())
        return graph_us(launch)


def measure(rank: int, num_ranks: int, width: int, store: str) -> None:
    torch.cuda.set_device(rank)
    place = torch.distributed.FileStore(store, num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=num_ranks, store=place)
    group = dist.group.WORLD
    assert group is not None
    bench = Bench(rank, num_ranks, width, group)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"{torch.cuda.get_device_name()} x {num_ranks}, torch {torch.__version__}, rows of {width}")
    say("   rows  sum + norm   two-shot       NCCL  norm alone")
    for rows in ROWS:
        one_shot = f"{bench.one_shot(rows):10.2f}" if rows <= MAX_PROGRAMS else " " * 10
        others = (bench.two_shot(rows), bench.nccl(rows), bench.norm_alone(rows))
        say(f"{rows:7}  {one_shot} " + " ".join(f"{us:10.2f}" for us in others))
    for rows in (1, 64, MAX_SAMPLES):
        say(f"logits of {rows} rows side by side: {bench.gather(rows):.2f}")
        say(f"bests of {rows} rows instead: {bench.bests(rows):.2f}")
    say(f"an expert of 9.4 MB handed on: {bench.hand_on():.2f}")
    for num_own in (128, 1024, 4096):
        megabytes = num_own * math.prod(KV_SHAPE) * 2 / 1e6
        us = bench.exchange(num_own)
        say(f"keys and values of {num_own} tokens each ({megabytes:.1f} MB): {us:.2f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank >= 0:
        measure(given.rank, given.ranks, given.width, given.store)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.ranks", "--ranks", str(given.ranks)]
        command += ["--width", str(given.width), "--store", str(Path(folder) / "store")]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], env={**os.environ, **ENVIRONMENT})
            for rank in range(given.ranks)
        ]
        sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
