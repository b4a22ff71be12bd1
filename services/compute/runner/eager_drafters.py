"""What drafts on the CPU, as the settings want it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from common.head_folder import HeadFolder
from services.compute.kernels.step.span import AttentionSpan
from services.compute.layers.cpu_operations import operations_for
from services.compute.layers.eager_attention import Geometry
from services.compute.layers.step_attention import EagerAttentions
from services.compute.models.draft_head import ModelEnds
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.runner.draft_model import DraftModel, DraftSizes
from services.compute.runner.drafter_pages import PlaceTable
from services.compute.runner.eager_heads import load_head
from services.compute.runner.model_loader import ModelLoader, has_room_for_dense
from services.compute.runner.page_room import PageRoom
from services.compute.runner.protocol import RunnerSpec
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.drafter import Drafter
from services.compute.speculative.ngram import NgramDrafter
from services.compute.step import Int64Array


class Host(NamedTuple):
    """What an executor has for a drafter."""

    spec: RunnerSpec
    sampler: Sampler
    tables_GNL: Int64Array
    spans: tuple[AttentionSpan, ...]  # of its cache groups

    @property
    def table(self) -> PlaceTable:
        """The page table that a drafter goes by: of layers that see everything, if there are."""
        number = self._group
        page_tokens = self.spec.kv_groups[0].page_tokens
        return PlaceTable(self.tables_GNL[number], page_tokens, self.spans[number])

    @property
    def room(self) -> PageRoom:
        """What has pages by that table."""
        sizes = self.spec.max_num_seqs, self.table.page_tokens, self.spec.max_model_len
        return PageRoom(*sizes, self._group)

    @property
    def _group(self) -> int:
        return next((n for n, span in enumerate(self.spans) if span.is_full), 0)


DrafterMaker: TypeAlias = Callable[[Host], Drafter]


def load_drafter(loader: ModelLoader, ends: ModelEnds) -> DrafterMaker | None:
    """Load what drafts for a model; None if nothing does, or the last of its stages."""
    drafts = loader.drafts
    if drafts is None or not loader.shard.is_last:
        return None
    if loader.head is not None:
        return _head(loader, loader.head, ends)
    if loader.drafter is not None:
        return _draft_model(loader.drafter, loader.max_positions)
    return lambda host: NgramDrafter(host.spec.max_num_seqs, host.spec.max_model_len, drafts)


def _head(loader: ModelLoader, folder: HeadFolder, ends: ModelEnds) -> DrafterMaker:
    operations = operations_for(loader.dtype)
    make_linear = operations.make_linears(loader.dtype, has_room_for_dense(folder.shape))
    loaded = load_head(loader, folder, ends, make_linear)

    def make(host: Host) -> Drafter:
        return loaded.drafter(host.spec, host.sampler, host.table)

    return make


def _draft_model(small: ModelLoader, max_positions: int) -> DrafterMaker:
    shape = small.config.shape
    operations = operations_for(small.dtype)
    make_linear = operations.make_linears(small.dtype, has_room_for_dense(shape))
    # Beyond the positions that it was trained for it guesses worse.
    model = EagerDecoder(
        small.decoder(make_linear), max_positions, make_step=operations.make_steps()
    )

    def make(host: Host) -> DraftModel:
        spec, num_groups = host.spec, len(small.layout.spans)
        page_tokens = small.settings.page_tokens
        layer_bytes = shape.layer_cache_bytes(page_tokens, small.dtype.itemsize)
        geometry = Geometry(page_tokens, layer_bytes)
        cache = small.cache(spec.num_pages * num_groups, spec.num_host_pages * num_groups)
        if host.table.span.is_full:
            attentions = operations.make_attentions(cache, geometry)
        else:
            attentions = EagerAttentions(cache, geometry, host.table.span)
        return DraftModel(
            model,
            cache,
            attentions,
            host.table,
            host.sampler,
            DraftSizes(
                spec.max_num_seqs,
                spec.max_model_len,
                spec.max_drafts,
                shape.vocab_size,
                spec.vocab_size,
            ),
        )

    return make
