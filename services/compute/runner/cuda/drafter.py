"""What guesses the tokens that follow, as the CUDA runner knows it. Variants are files:
`text_drafter`, and `pass_drafter` for what computes (`model_passes`, `head_passes`).

All of it is launches in the order of the stream, and nothing comes to the host but a step's tokens
and counts: a step is verified, drawn, accepted, advances lengths on the device, and the next step's
drafts follow from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.drafts.draft_tokens import DraftRule
from services.compute.kernels.step.slot_words import SampleRows
from services.compute.kernels.step.step_buffers import Resident, StepInputs
from services.compute.kv.transfer import Direction
from services.compute.models.kernel_decoder import KernelDecoder
from services.compute.runner.cuda.device_model import MachineSizes
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.step import Int32Array

Launch: TypeAlias = tuple[tuple[object, ...], Callable[[], None]]


class MachineParts(NamedTuple):
    """What a step machine has for a drafter."""

    packed: Tensor
    inputs: StepInputs
    resident: Resident
    sizes: MachineSizes
    rule: DraftRule
    choices: Choices
    stream: DeviceStream
    decoder: KernelDecoder  # of the large model: its pass leaves hidden states there


def lent_group(machine: MachineParts) -> int:
    """The cache group whose page table a drafter goes by: of layers that see everything."""
    return next(n for n, span in enumerate(machine.sizes.layout.spans) if span.is_full)


class DeviceDrafter(Protocol):
    """Guesses tokens by slot, into `Resident.drafts_NK`.

    `enter`, `see` and `follow` are parts of launches of the machine, and captured with them.
    """

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        """Have room for what it keeps with so many pages of the large model, on the device and on
        the host."""
        ...

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        """Where what it keeps with pages is read and written by a transfer of these."""
        ...

    def enter(self, packed: Tensor) -> None:
        """Sequences take their slots."""
        ...

    def see(self, num_tokens: int, has_chunks: bool) -> None:
        """Behind the large model's pass over up to so many tokens."""
        ...

    def follow(self, rows: SampleRows, said_NV: Tensor, result_SW: Tensor) -> None:
        """Accept drafts by the draws, advance the slots, and draft for the next step or say that
        there will be drafts."""
        ...

    def launches(self, sampler: DeviceSampler) -> Iterator[Launch]:
        """What it replays by itself, largest first."""
        ...

    def ask(self, num_tokens: int) -> None:
        """Go through its products for so many rows."""
        ...

    def draft(self, ints: Int32Array, header: list[int]) -> None:
        """Replay what is to come before the pass of the step whose upload is in `packed`."""
        ...


DrafterMaker: TypeAlias = Callable[[MachineParts], DeviceDrafter]
