"""The interpreter that the kernels' tests run in gives the bits of Triton's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.lean_interpreter import make_lean

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.int8)
BOTH = "from tests.kernels.test_lean_interpreter import run_both; run_both()"


@triton.jit
def _mixed(left_ptr, right_ptr, out_ptr, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Operands of two types, blocks of several shapes, numbers of both signs on either side."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    places = rows[:, None] * COLUMNS + columns[None, :]
    is_there = places < count
    left = tl.load(left_ptr + places, mask=is_there, other=1)
    right = tl.load(right_ptr + places, mask=is_there, other=1)
    one_row = tl.load(right_ptr + columns)
    total = left + right * one_row[None, :]
    total = tl.where(total > 3, total - 2, 5 - total)
    total = (total * 0.5 - -1.5) / (2 + tl.abs(total).to(tl.float32))
    total += tl.where(places % 3 == 1, -1, 1) + (places // 7 & 3) + (1 << (columns & 2))[None, :]
    odd = tl.load(left_ptr + places.to(tl.int64), mask=is_there & (places % 2 > 0))
    total += odd.to(tl.int8) + (places >> 1) + (left == right).to(tl.int32) - (1 >= places)
    total += tl.sum(total, axis=0)[None, :] + tl.max(total, axis=1)[:, None] + program
    tl.store(out_ptr + places, total, mask=is_there)


@triton.jit
def _widened(in_ptr, out_ptr, COUNT: tl.constexpr):
    """Every value of a type of few bits, among them infinite, subnormal and undefined ones."""
    places = tl.arange(0, COUNT)
    tl.store(out_ptr + places, tl.load(in_ptr + places).to(tl.float32))


def outputs() -> list[torch.Tensor]:
    """What the kernel makes of every pair of types; the last program has a tail."""
    generator = torch.Generator().manual_seed(3)
    count, found = 8 * 16 * 2 - 5, []
    for left_dtype in DTYPES:
        for right_dtype in DTYPES:
            left, right = torch.randint(0, 9, (2, count), generator=generator)
            out = torch.zeros(count)
            _mixed[2,](left.to(left_dtype), right.to(right_dtype), out, count, 8, 16)
            found.append(out)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        count = 1 << 8 * dtype.itemsize
        bits = torch.arange(count).to((torch.uint8, torch.uint16)[dtype.itemsize - 1])
        out = torch.zeros(count)
        _widened[1,](bits.view(dtype), out, count)
        found.append(out.view(torch.int32))
    return found


def run_both() -> None:
    """In Triton's own interpreter first, as what is patched stays so."""
    own = outputs()
    with pytest.MonkeyPatch.context() as patch:
        make_lean(patch)
        for _ in range(2):  # what was found out the first time is used the second
            assert all(map(torch.equal, outputs(), own))
    assert len({tuple(out.tolist()) for out in own}) == len(own)


def test_it_gives_the_same_bits_for_operands_of_any_two_types() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BOTH]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
