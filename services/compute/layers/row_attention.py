"""Attention of steps whose rows have one query each, by compiled kernels straight over the pages.

Shape legend: R rows, H query heads, K kv heads, D head width, G cache groups, L pages of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.compute.distributed.context import ALL_HERE, StoredTokens
from services.compute.kernels.cpu import attention as kernels
from services.compute.kernels.cpu.graph import attend, store
from services.compute.kernels.cpu.heads import LANES
from services.compute.kernels.cpu.language import LIKE
from services.compute.kernels.cpu.team import num_threads, team_of
from services.compute.layers.eager_attention import Geometry, pages_begun
from services.compute.layers.page_layers import Int64Array
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.step_attention import EagerAttentions, StepAttention

ALONE_PRODUCTS = 1 << 15
"""Products of a layer's queries and keys up to which one thread is faster than two."""

MORE_ROOM = 64
TABLE_WIDTH = 6  # its place among the sizes


class RowAttention:
    """Attention of one step."""

    def __init__(self, cache: PagedCache, positions_R: Int64Array, tables_GRL: Int64Array) -> None:
        self.positions_T = torch.from_numpy(positions_R)
        self._form = form = next(iter(cache.formats.values()))
        self._places, spans = cache.layout.places, cache.layout.spans
        self._pages_ptr, self._layer_bytes = cache.device_pages.data_ptr(), form.num_bytes
        self._like, self._mix = LIKE[form.dtype], kernels.MIX[form.dtype]
        # As kernels read them: positions, the first that each row sees, and its table.
        firsts = (span.first_position(positions_R) for span in spans)
        self._rows = [
            np.concatenate((positions_R, first_R, table_RL.reshape(-1)))
            for first_R, table_RL in zip(firsts, tables_GRL, strict=True)
        ]
        self._rows_ptrs = [rows.ctypes.data for rows in self._rows]
        self._sizes = np.array(
            (
                len(positions_R),
                0,
                form.kv_heads,
                form.page_tokens,
                cache.layout.page_bytes // form.dtype.itemsize,
                form.head_dim,
                tables_GRL.shape[2],
            )
        )
        self._sizes_ptr = self._sizes.ctypes.data
        self._out_TC: Tensor | None = None
        self._num_keys = int((positions_R + 1).sum())
        offsets_R = positions_R % form.page_tokens
        if not offsets_R.all():
            pages = positions_R // form.page_tokens
            for table_RL in tables_GRL:
                written_R = table_RL[np.arange(len(pages)), pages]
                cache.clear(pages_begun(written_R, offsets_R, form.page_tokens).tolist())

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        kv_T2KD: Tensor,
        softcap: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        group, number = self._places[layer]
        out_TC = self._out_TC
        if out_TC is None:
            num_rows, heads, width = q_THD.shape
            assert not heads % self._form.kv_heads
            self._sizes[1] = heads
            self._out_TC = out_TC = q_THD.new_empty(num_rows, heads * width)
            step = self._sizes_ptr, self._team_ptr(), q_THD.stride(0), out_TC.data_ptr()
            self._work = np.array(step + (0,) * (len(kernels.WORK) - len(step)))
            self._work_ptr = self._work.ctypes.data
        pages_ptr = self._pages_ptr + number * self._layer_bytes
        rows_ptr = self._rows_ptrs[group]
        where = pages_ptr, self._sizes_ptr, rows_ptr
        store(kv_T2KD.data_ptr(), kv_T2KD.stride(0), *where, self._like)
        sinks_ptr = 0 if sinks_H is None else sinks_H.data_ptr()
        attend(self._work_ptr, q_THD.data_ptr(), *where[::2], sinks_ptr, softcap, self._mix)
        return out_TC

    def make_room(self) -> None:
        """For tables of more pages, before anything is attended to."""
        self._rows = [np.concatenate((rows, rows, np.zeros(MORE_ROOM, int))) for rows in self._rows]
        self._rows_ptrs = [rows.ctypes.data for rows in self._rows]

    def take(self, other: RowAttention) -> bool:
        """Have the rows of another step, of as many; False if their tables have no room here."""
        if any(len(own) < len(rows) for own, rows in zip(self._rows, other._rows, strict=True)):
            return False
        for own, rows in zip(self._rows, other._rows, strict=True):
            own[: len(rows)] = rows
        self._sizes[TABLE_WIDTH] = other._sizes[TABLE_WIDTH]
        return True

    def _team_ptr(self) -> int:
        assert self._out_TC is not None
        alone = self._num_keys * self._out_TC.shape[1] <= ALONE_PRODUCTS
        self._team = team_of(1 if alone else num_threads())
        return int(self._team.ctypes.data)


class RowAttentions:
    """Compiled where all rows have one query of whole vectors, else in plain torch."""

    def __init__(self, cache: PagedCache, geometry: Geometry) -> None:
        self._cache = cache
        self._eager = EagerAttentions(cache, geometry)
        self._has_rows = not any(
            form.is_quantized or form.latent_dim or form.head_dim % LANES
            for form in cache.formats.values()
        )

    def __call__(
        self,
        q_start: Int64Array,
        q_len: Int64Array,
        tables_GRL: Int64Array,
        num_decode_rows: int,
        tokens: StoredTokens = ALL_HERE,
    ) -> StepAttention:
        if self._has_rows and num_decode_rows == len(q_len) and tokens is ALL_HERE:
            return RowAttention(self._cache, q_start, tables_GRL)
        return self._eager(q_start, q_len, tables_GRL, num_decode_rows, tokens)
