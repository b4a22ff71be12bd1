"""The launch that adds hidden states to the sums of embeddings, a slice at a time.

Shape legend: T tokens of a slice, N slots, E hidden width, R rows of a step, W words of a row.
"""

from __future__ import annotations

import torch

from services.compute.kernels.pool import ROW_WORDS, pool
from services.compute.models.fused_decoder import FusedDecoder
from services.compute.runner.cuda.stream import DeviceStream

SLICE_TOKENS = 512
HEADER_INTS = 8  # of which the first says how many rows there are


class PoolLaunch:
    """Reads the hidden states that a forward pass left.

    The upload of a step is a block for each slice: a header, the tokens whose hidden states are
    normalised, and the table of `kernels.pool`, whose FIRST counts within the slice.
    """

    def __init__(
        self, decoder: FusedDecoder, max_tokens: int, max_rows: int, hidden_size: int
    ) -> None:
        self._decoder = decoder
        device = decoder.device
        self.slice_tokens = min(max_tokens, SLICE_TOKENS)
        self.max_rows = max_rows
        self.block_ints = HEADER_INTS + self.slice_tokens + max_rows * ROW_WORDS
        num_slices = -(-max_tokens // self.slice_tokens)
        self.packed = torch.zeros(num_slices * self.block_ints, dtype=torch.int32, device=device)
        self._block = torch.zeros(self.block_ints, dtype=torch.int32, device=device)
        self._sum_NE = torch.zeros(max_rows, hidden_size, device=device)
        self.out_RE = torch.zeros(max_rows, hidden_size, device=device)

    @property
    def name(self) -> tuple[str, int]:
        """What it is recorded as."""
        return "pool", self.slice_tokens

    def replay(self, stream: DeviceStream, num_slices: int) -> None:
        """Add what the slices in `packed` say; complete sums go to `out_RE`."""
        ints = self.block_ints
        for number in range(num_slices):
            self._block.copy_(self.packed[number * ints : (number + 1) * ints])
            stream.replay(self.name)

    @torch.inference_mode()
    def launch(self) -> None:
        """Add what the block says; to be recorded."""
        table_at = HEADER_INTS + self.slice_tokens
        table_RW = self._block[table_at:].view(self.max_rows, ROW_WORDS)
        normed_TE = self._decoder.normed_at(self._block[HEADER_INTS:table_at])
        pool(normed_TE, self._block[:1], table_RW, self._sum_NE, self.out_RE)
