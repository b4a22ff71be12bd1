"""A step's chunks of prompts as a drafter sees them: whole, also where ranks share their tokens.

Shape legend: T tokens, C chunks, X whatever there is of each token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.compute.distributed.context import ALL_HERE, StoredTokens
from services.compute.runner.read_rows import tokens_of
from services.compute.runner.slot_states import Rows
from services.compute.speculative.drafter import ChunkRows


class StepChunks(NamedTuple):
    chunks: ChunkRows
    tokens: StoredTokens = ALL_HERE
    order_T: Tensor | None = None  # of tokens in what the ranks have; None: they are in order

    @staticmethod
    def of(rows: Rows, num_decodes: int, tokens: StoredTokens) -> StepChunks:
        """Behind so many decode rows, which are every rank's."""
        here = ChunkRows(
            rows.slots_R[num_decodes:],
            rows.q_start_R[num_decodes:],
            rows.q_len_R[num_decodes:],
            rows.tokens_T[num_decodes:],
        )
        if tokens is ALL_HERE:
            return StepChunks(here)
        columns_3T = torch.from_numpy(np.stack((*tokens_of(*here[:3]), here.tokens_T)))
        slots_T, positions_T, ids_T = tokens.completed(columns_3T.T).numpy().T
        order_T = np.lexsort((positions_T, slots_T))
        slots_T, positions_T, ids_T = slots_T[order_T], positions_T[order_T], ids_T[order_T]
        begins_C = np.flatnonzero(np.diff(slots_T, prepend=-1))  # a slot has one chunk at most
        lengths_C = np.diff(begins_C, append=len(slots_T))
        chunks = ChunkRows(slots_T[begins_C], positions_T[begins_C], lengths_C, ids_T)
        order_T = np.concatenate((np.arange(num_decodes), num_decodes + order_T))
        return StepChunks(chunks, tokens, torch.from_numpy(order_T))

    def whole(self, x_TX: Tensor) -> Tensor:
        """Of all decode rows and the tokens of the chunks, from those that are here."""
        if self.order_T is None:
            return x_TX
        return self.tokens.completed(x_TX).index_select(0, self.order_T)
