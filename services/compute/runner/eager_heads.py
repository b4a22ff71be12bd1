"""Loads the head that drafts on the CPU, and makes the drafter of it."""

from __future__ import annotations

from dataclasses import dataclass

from common.head_folder import HeadFolder
from services.compute.kernels.step.span import FULL
from services.compute.layers.eager_attention import Geometry
from services.compute.layers.eager_step import RopeTables
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.weighted_layers import LinearMaker, LinearMap
from services.compute.models.draft_head import DraftHead, ModelEnds
from services.compute.models.medusa import MedusaHeads
from services.compute.runner.drafter_pages import HiddenPages, PageCounts, PlaceTable
from services.compute.runner.head_drafter import HeadCache, HeadDrafter, HeadSizes, PagedHead
from services.compute.runner.head_loader import build_head, head_format
from services.compute.runner.medusa_drafter import MedusaDrafter
from services.compute.runner.model_loader import ModelLoader
from services.compute.runner.protocol import RunnerSpec
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.draft_counts import DRAFTERS
from services.compute.speculative.drafter import Drafter


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, for the executor that is made next."""

    loader: ModelLoader
    folder: HeadFolder
    heads: tuple[DraftHead, ...] | MedusaHeads

    def drafter(self, spec: RunnerSpec, sampler: Sampler, table: PlaceTable) -> Drafter:
        dtype = self.loader.dtype
        counts = PageCounts(spec.num_pages, spec.num_host_pages)
        width = self.folder.shape.hidden_size
        if isinstance(self.heads, MedusaHeads):
            hidden = HiddenPages(table, counts, width, dtype)
            return MedusaDrafter(self.heads, hidden, sampler, spec.max_drafts)
        number = DRAFTERS.index(self.folder.method)
        sizes = HeadSizes(spec.max_num_seqs, spec.max_model_len, spec.max_drafts, number)
        heads = [
            PagedHead(head, HiddenPages(table, counts, width, dtype), self._cache(head, counts))
            for head in self.heads
        ]
        return HeadDrafter(heads, table, sampler, sizes)

    def _cache(self, head: DraftHead, counts: PageCounts) -> HeadCache:
        loader, form = self.loader, head_format(self.loader, self.folder)
        layout = CacheLayout.of((FULL,), {FULL: form.num_bytes})
        pages = PagedCache(layout, {FULL: form}, counts, loader.device)
        # Beyond the positions that it was trained for it guesses worse.
        ropes = RopeTables(head.mixers, loader.max_positions, loader.dtype)
        return HeadCache(pages, Geometry(loader.settings.page_tokens, form.num_bytes), ropes)


def load_head(
    loader: ModelLoader, folder: HeadFolder, ends: ModelEnds, make_linear: LinearMaker[LinearMap]
) -> LoadedHead:
    """Load the head of a model that is loaded."""
    return LoadedHead(loader, folder, build_head(loader, folder, ends, make_linear))
