"""The device's side of a step: what every kernel of it reads, at addresses that never change.

CUDA graphs hold addresses, not tensors, so these are made once and filled anew for each step.

Shape legend: R rows, T tokens, S samples, N slots, L pages of the longest sequence, W words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_COUNTS = 8
NUM_ROWS, NUM_DECODE_ROWS, NUM_TOKENS, NUM_SAMPLES = range(4)
"""Places in `counts`: the step's real sizes, of which the host tells kernels nothing else."""

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, unpacked. Beyond the counted sizes lies padding up to the bucket."""

    counts: Tensor  # int32 [NUM_COUNTS]
    tokens_T: Tensor  # int32; padding 0
    positions_T: Tensor  # int32; padding 0
    kv_slots_T: Tensor  # int64, page * page_tokens + offset; padding -1: nothing is stored
    row_slot_R: Tensor  # int32
    q_start_R: Tensor  # int32, position of the row's first query
    q_len_R: Tensor  # int32
    token_start_R: Tensor  # int32, the row's first token
    sample_token_S: Tensor  # int32, the token whose logits are sampled; padding 0
    sample_slot_S: Tensor  # int32; padding NO_SLOT
    sample_index_S: Tensor  # int32, output index; padding 0

    @staticmethod
    def make(max_tokens: int, max_rows: int, device: torch.device) -> StepInputs:
        """Buffers for the largest step."""

        def ints(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return StepInputs(
            counts=ints(NUM_COUNTS),
            tokens_T=ints(max_tokens),
            positions_T=ints(max_tokens),
            kv_slots_T=ints(max_tokens, torch.int64).fill_(-1),
            row_slot_R=ints(max_rows),
            q_start_R=ints(max_rows),
            q_len_R=ints(max_rows),
            token_start_R=ints(max_rows),
            sample_token_S=ints(max_rows),
            sample_slot_S=ints(max_rows).fill_(NO_SLOT),
            sample_index_S=ints(max_rows),
        )


@dataclass(frozen=True, slots=True)
class Resident:
    """What stays on the device from step to step, by slot."""

    page_table: Tensor  # int32 [N, L]
    last_token: Tensor  # int32 [N], the token sampled last, the next step's input
    slot_params: Tensor  # int32 [N, W], sampling settings; floats by their bits

    @staticmethod
    def make(num_slots: int, max_pages: int, num_words: int, device: torch.device) -> Resident:
        """Tables for this many slots."""

        def table(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Resident(table(num_slots, max_pages), table(num_slots), table(num_slots, num_words))
