"""Loads the head that drafts on the CPU, and makes the drafter of it."""

from __future__ import annotations

from dataclasses import dataclass

from common.quantization import read_quantization
from services.compute.kernels.kv_format import LayerFormat
from services.compute.kernels.span import FULL, AttentionSpan
from services.compute.layers.eager_attention import Geometry
from services.compute.layers.eager_step import RopeTables
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.weighted_layers import LinearMaker, LinearMap
from services.compute.models.builder import Builder
from services.compute.models.draft_head import DraftHead, HeadSource, ModelEnds
from services.compute.models.eagle import build_eagle
from services.compute.models.eagle3 import build_eagle3
from services.compute.models.medusa import MedusaHeads, build_medusa
from services.compute.models.next_token import build_next_token
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.models.weights import CheckpointWeights
from services.compute.quantization.config import format_of
from services.compute.runner.head_drafter import HeadCache, HeadDrafter, HeadSizes
from services.compute.runner.head_folder import HeadFolder
from services.compute.runner.hidden_pages import HiddenPages, PageCounts, PlaceTable
from services.compute.runner.medusa_drafter import MedusaDrafter
from services.compute.runner.model_loader import ModelLoader
from services.compute.runner.protocol import RunnerSpec
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.drafter import Drafter
from services.compute.speculative.settings import DRAFTERS
from services.compute.step import Int64Array


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head, for the executor that is made next."""

    loader: ModelLoader
    folder: HeadFolder
    head: DraftHead | MedusaHeads

    def drafter(
        self, spec: RunnerSpec, sampler: Sampler, pages_NL: Int64Array, span: AttentionSpan
    ) -> Drafter:
        """What drafts with it, by the page table of layers that see this span."""
        page_tokens, dtype = self.loader.settings.page_tokens, self.loader.dtype
        table = PlaceTable(pages_NL, page_tokens, span)
        counts = PageCounts(spec.num_pages, spec.num_host_pages)
        hidden = HiddenPages(table, counts, self.folder.shape.hidden_size, dtype)
        if isinstance(self.head, MedusaHeads):
            return MedusaDrafter(self.head, hidden, sampler, spec.max_drafts)
        number = DRAFTERS.index(self.folder.method)
        sizes = HeadSizes(spec.max_num_seqs, spec.max_model_len, spec.max_drafts, number)
        cache = self._cache(self.head, counts)
        return HeadDrafter(self.head, hidden, cache, table, sampler, sizes)

    def _cache(self, head: DraftHead, counts: PageCounts) -> HeadCache:
        loader, shape = self.loader, self.folder.shape
        width, latent_dim = shape.head_dim, 0
        if shape.latent is not None:
            width, latent_dim = shape.latent.entry_dim, shape.latent.latent_dim
        sizes = shape.num_kv_heads, loader.settings.page_tokens, width, loader.dtype
        form = LayerFormat(*sizes, loader.dtype, latent_dim)
        layout = CacheLayout.of((FULL,), {FULL: form.num_bytes})
        pages = PagedCache(layout, {FULL: form}, counts, loader.device)
        # Beyond the positions that it was trained for it guesses worse.
        ropes = RopeTables(head.mixers, loader.max_positions, loader.dtype)
        return HeadCache(pages, Geometry(loader.settings.page_tokens, form.num_bytes), ropes)


def load_head(
    loader: ModelLoader, folder: HeadFolder, ends: ModelEnds, make_linear: LinearMaker[LinearMap]
) -> LoadedHead:
    """Load the head of a model that is loaded."""
    source = _source(loader, folder, ends, make_linear)
    head: DraftHead | MedusaHeads
    if folder.method == "medusa":
        head = build_medusa(source, folder.num_heads, folder.num_blocks)
    elif folder.method == "mtp":
        head = _next_token(loader, source)
    else:
        head = (build_eagle3 if folder.method == "eagle3" else build_eagle)(source)
    return LoadedHead(loader, folder, head)


def _source(
    loader: ModelLoader, folder: HeadFolder, ends: ModelEnds, make_linear: LinearMaker[LinearMap]
) -> HeadSource:
    about = folder.shape, folder.raw
    if folder.method == "mtp" or loader.settings.load_format == "dummy":
        return HeadSource(*about, loader.weights(), None, make_linear, ends)
    files = SafetensorsFiles(folder.folder, loader.device, format_of(read_quantization(folder.raw)))
    weights = loader.quantized(CheckpointWeights(files, loader.dtype, loader.device))
    return HeadSource(*about, weights, files, make_linear, ends)


def _next_token(loader: ModelLoader, source: HeadSource) -> DraftHead:
    config, make_layers = loader.config, loader.config.family.next_token_layers
    if make_layers is None:
        raise ValueError("a family without such layers was refused before")
    make: Builder[LinearMap] = source.builder()
    eps = float(getattr(config.fields, "rms_norm_eps", 1e-6))
    return build_next_token(source, make, make_layers(config.fields, make), eps)
