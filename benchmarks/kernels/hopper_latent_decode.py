"""Decode over latents by the kernel for Hopper and by the other one, on the same inputs.

Of heads between those that were measured when FEW_HEADS was chosen (16 and 128), too. A share of
the memory's speed is one of what the copy, which comes first, reaches on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from benchmarks.kernels.latent_attention import Decode
from services.compute.kernels.mla.hopper_latent_decode import hopper_latent_attention
from services.compute.kernels.mla.latent_attention import latent_decode_attention
from services.compute.layers.kernel_attention import Decode as Kernel

KERNELS: dict[str, Kernel] = {"plain": latent_decode_attention, "hopper": hopper_latent_attention}
HEADS = (16, 32, 48, 64, 128)
BATCHES = ("1x4096", "64x4096", "16x32768", "256x1024")
COPY_BYTES = 600 << 20


def cases() -> Iterator[Case]:
    yield _copy_case()
    for heads in HEADS:
        for batch in BATCHES:
            for name, kernel in KERNELS.items():
                yield _case(f"{name} {heads} heads {batch}", kernel, Decode(heads, batch))


def _copy_case() -> Case:
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return Case("copy", [partial(target.copy_, source)], num_bytes=2 * COPY_BYTES)


def _case(name: str, kernel: Kernel, step: Decode) -> Case:
    def launch() -> Callable[[], None]:
        return partial(kernel, step.call(), step.work, step.rows, pdl=True)

    call = step.call()
    kernel(call, step.work, step.rows, pdl=False)
    step.check(name, call)
    return step.case(name, launch, step.num_bytes)
