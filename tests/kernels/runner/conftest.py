"""Runners in Triton's interpreter run on a device of few multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton.language as tl

from services.compute.kernels import decode_plan, matvec_config
from services.compute.kernels.decode_plan import DecodeWork

HOST_PROGRAMS = 16
"""Instead of the 132 or 264 that fill an H200. A product still has several, most of several rows,
and the 199 logits a block with a tail. Decode attention still cuts contexts into its shortest
chunks, of 64 positions: for two kv heads there may be 8 more than rows, and the steps here have 6
at most.
"""


@pytest.fixture(scope="module", autouse=True)
def few_multiprocessors(device: torch.device) -> Iterator[None]:
    """A thousand programs a step otherwise: of one output each, or with nothing to do at all."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type != "cuda":
            patch.setattr(matvec_config, "MIN_PROGRAMS", HOST_PROGRAMS)
            # contexts are short here: programs of more chunks would have nothing to do
            patch.setattr(decode_plan, "LONG_SHARE", tl.constexpr(1))
            patch.setitem(DecodeWork.make.__kwdefaults__, "extra_programs", HOST_PROGRAMS)
        yield
