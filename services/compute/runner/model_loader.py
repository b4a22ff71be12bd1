"""What the torch runners are made of: a model folder as the settings ask for it on a machine."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from common.architectures import model_pooling
from common.decoder_shape import DecoderShape, check_split
from common.errors import ConfigError
from common.gguf.folder import INDEX_NAME as GGUF_INDEX_NAME
from common.head_folder import DraftedFor, HeadFolder, read_head
from common.host import available_memory, is_fast_at_bf16
from common.model_folder import Pooling, eos_token_ids, locate, read_model_config
from common.quantization import QuantizationConfig, check_at_load, read_quantization
from common.speculative import SpeculativeSettings, check_vocabulary, read_speculative
from services.compute.config import ComputeSettings
from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.distributed.shard import ExpertPlacement, HeadPart, Shard
from services.compute.distributed.stages import ONE_STAGE, Stages
from services.compute.kernels.kv.kv_format import FP8, INT8, LayerFormat
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kv.memory import KVGroup, KVMemory
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.weighted_layers import LinearMaker
from services.compute.models.decoder import Decoder
from services.compute.models.families import ModelConfig, read_config
from services.compute.models.gguf_weights import GgufFiles
from services.compute.models.safetensors_files import SafetensorsFiles
from services.compute.models.weights import (
    CheckpointWeights,
    DummyWeights,
    QuantizedAtLoad,
    WeightSource,
)
from services.compute.quantization.at_load import Quantization
from services.compute.quantization.config import format_of
from services.compute.runner.expert_placement import expert_placement
from services.compute.runner.notices import log_notices
from services.compute.runner.protocol import RunnerSpec

L = TypeVar("L")

KV_CACHE_DTYPES = {"fp8": FP8, "int8": INT8}

OF_DRAFTER = {
    "speculative_config": "off", "max_model_len": 0, "enable_expert_parallel": False,
    "expert_counts": "", "num_redundant_experts": 0, "enable_eplb": False,
}  # fmt: skip
"""Of the settings those of the model that are not a drafter's: every rank has all of it."""

CPU_MEMORY_SHARE = 0.25
"""Of the memory that is available: the weights, the other services and the system want theirs."""

BYTES_PER_THREAD = 16 << 20
"""Weights that make a thread worth its barriers: a model of 10 MB took 2.2 ms a step with one
thread and 2.5 with three on idle cores, and 200 times as long on busy ones, where a barrier waits
for whichever thread has no core."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest sequence and the pages of the KV cache."""

    max_model_len: int
    num_pages: int
    num_host_pages: int


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A Hugging Face folder as the settings ask for it on a device.

    Its methods raise ModelError or ConfigError, which say what to do.
    """

    folder: Path
    settings: ComputeSettings
    device: torch.device
    config: ModelConfig
    pooling: Pooling | None
    dtype: torch.dtype
    quantization: QuantizationConfig | None = None  # of the folder
    ranks: Ranks = ALONE
    placement: ExpertPlacement | None = None  # of whole experts
    stages: Stages = ONE_STAGE
    drafter: ModelLoader | None = None  # of a model that drafts for this one
    context: Ranks = ALONE  # that have all of the model, as this one
    head: HeadFolder | None = None  # that drafts for it

    @staticmethod
    def read(
        folder: Path,
        settings: ComputeSettings,
        device: torch.device,
        ranks: Ranks = ALONE,
        stages: Stages = ONE_STAGE,
    ) -> ModelLoader:
        """Read all of a Hugging Face folder but its weights."""
        context = ALONE
        if settings.prefill_context_parallel_size > 1:
            ranks, context = ALONE, ranks
        raw = read_model_config(folder)
        config, pooling = read_config(raw), model_pooling(folder, raw)
        dtype, quantization = choose_dtype(settings, device), read_quantization(raw)
        check_at_load(quantization, settings.quantization)
        if not ranks.rank:
            log_notices(raw, settings, dtype)
        placement = expert_placement(settings, config.shape.experts, ranks)
        check_split(config.shape, ranks.size, stages.count, device.type == "cuda")
        about = config, pooling, dtype, quantization
        loader = ModelLoader(folder, settings, device, *about, ranks, placement, stages)
        head = read_head(loader.drafts, DraftedFor(folder, raw, config.shape))
        drafter = loader._read_drafter()
        return replace(loader, drafter=drafter, head=head, context=context)

    def _read_drafter(self) -> ModelLoader | None:
        """The model of the settings that drafts; ConfigError for one of another vocabulary."""
        drafts = self.drafts
        if drafts is None or drafts.method != "draft_model":
            return None
        folder = locate(drafts.model, drafts.revision)
        settings = self.settings.model_copy(update=OF_DRAFTER)
        drafter = ModelLoader.read(folder, settings, self.device)
        sizes = self.config.shape.vocab_size, drafter.config.shape.vocab_size
        check_vocabulary(drafts.model, (self.folder, folder), sizes)
        return drafter

    @property
    def drafts(self) -> SpeculativeSettings | None:
        """None for a model that makes embeddings."""
        if self.pooling is not None:
            return None
        return read_speculative(self.settings.speculative_config)

    @property
    def shard(self) -> Shard:
        """The part of the model that is loaded."""
        ranks, stages = self.ranks, self.stages
        about = self.placement, stages.number, stages.count
        return Shard(ranks.rank, ranks.size, *about, has_head=self.head is not None)

    @property
    def heads(self) -> HeadPart:
        shape = self.config.shape
        return self.shard.heads(shape.num_heads, shape.num_kv_heads)

    @property
    def max_positions(self) -> int:
        """The length of the settings, or the model's."""
        longest = self.config.shape.max_position_embeddings
        wanted = self.settings.max_model_len
        if wanted > longest:
            raise ConfigError(
                f"compute.max_model_len is {wanted}, and the model's positions end at {longest} "
                "(max_position_embeddings in its config.json); lower it."
            )
        return wanted or longest

    @property
    def max_prefill_tokens(self) -> int:
        return self.settings.max_prefill_tokens or (512 if self.device.type == "cpu" else 8192)

    @property
    def max_step_tokens(self) -> int:
        return self.max_prefill_tokens + self.settings.max_num_seqs

    @property
    def formats(self) -> dict[AttentionSpan, LayerFormat]:
        """How a layer's keys and values lie in a page, by its span."""
        return self._formats(self.heads)

    def _formats(self, heads: HeadPart) -> dict[AttentionSpan, LayerFormat]:
        """Of a rank with these heads.

        Layers that see a part stay as they are, beside those that see all: they hold few positions
        of a long text, so that there is little to save.
        """
        model, spans = self.config.shape, set(self.config.spans)
        entry = KV_CACHE_DTYPES.get(self.settings.kv_cache_dtype, self.dtype)
        if model.latent is not None:
            width, latent_dim = model.latent.entry_dim, model.latent.latent_dim
            sizes = (1, self.settings.page_tokens, width, self.dtype)
            return {FULL: LayerFormat(*sizes, entry, latent_dim)}
        sizes = (len(heads.kv), self.settings.page_tokens, model.head_dim, self.dtype)
        return {
            span: LayerFormat(*sizes, entry if span.is_full or FULL not in spans else self.dtype)
            for span in spans
        }

    @property
    def layout(self) -> CacheLayout:
        """Page tables are all ranks' and all stages': so pages are those of rank 0, which has as
        many heads as any, and have room for as many layers of each span as any stage has."""
        shape, first = self.config.shape, Shard(0, self.ranks.size)
        formats = self._formats(first.heads(shape.num_heads, shape.num_kv_heads))
        sizes = {span: form.num_bytes for span, form in formats.items()}
        count = self.stages.count
        parts = (Shard(stage=n, num_stages=count).layers(shape.num_layers) for n in range(count))
        by_stage = [self.config.spans[part.start : part.stop] for part in parts]
        most = list(by_stage[0])
        for spans in by_stage[1:]:
            most += (Counter(spans) - Counter(most)).elements()
        return CacheLayout.of(most, sizes).of_layers(by_stage[self.stages.number])

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        layout = self.layout
        return tuple(
            KVGroup(
                kind="mla" if self.config.shape.latent else "full" if span.is_full else "window",
                num_layers=layout.layers_per_group[span],
                page_tokens=self.settings.page_tokens,
                page_bytes=self.page_bytes,
                span=span,
            )
            for span in layout.spans
        )

    @property
    def page_bytes(self) -> int:
        """Of any page: every group has as many layers as fit. A drafter has its own beside it."""
        page_bytes = self.layout.page_bytes
        if self.drafter is not None:
            page_bytes += self.drafter.all_groups_bytes
        if self.head is not None:
            page_bytes += self.head.page_bytes(self.settings.page_tokens, self.dtype.itemsize)
        return page_bytes

    @property
    def all_groups_bytes(self) -> int:
        """Of a page of every group."""
        return self.layout.page_bytes * len(self.layout.spans)

    @property
    def at_load(self) -> Quantization | None:
        """What weights are made that are not quantized: the settings', or those of a model without
        weights that says it has such ones. What a quantized checkpoint leaves out stays."""
        if self.quantization is None:
            wanted = self.settings.quantization
            return None if wanted == "auto" else wanted
        return self.quantization.kind if self.settings.load_format == "dummy" else None

    def decoder(self, make_linear: LinearMaker[L]) -> Decoder[L]:
        needs_head = self.pooling is None
        return self.config.build(self.weights(), make_linear, needs_head, self.shard)

    def weights(self) -> WeightSource:
        """Of the folder, of which nothing has been taken."""
        weights: WeightSource
        if self.settings.load_format == "dummy":
            weights = DummyWeights(self.dtype, self.device)
        elif (self.folder / GGUF_INDEX_NAME).is_file():
            gguf = GgufFiles(self.folder, self.device)
            weights = CheckpointWeights(gguf, self.dtype, self.device)
        else:
            stacks = self.config.family.stacks
            files = SafetensorsFiles(self.folder, self.device, format_of(self.quantization), stacks)
            weights = CheckpointWeights(files, self.dtype, self.device)
        return self.quantized(weights)

    def quantized(self, weights: WeightSource) -> WeightSource:
        """What is made of weights when they are loaded."""
        if self.at_load is None:
            return weights
        return QuantizedAtLoad(weights, self.at_load, self.quantization)

    def limits(self, room_bytes: Callable[[], int]) -> Limits:
        """`room_bytes` returns the memory for pages; it is called where the settings do not say."""
        settings, max_model_len = self.settings, self.max_positions
        num_pages = self._least(self._num_pages(room_bytes))
        memory = KVMemory(num_pages, 0, self.groups)
        capacity = memory.longest_sequence(max_model_len, self.max_prefill_tokens)
        if capacity < max_model_len:
            if settings.max_model_len:
                raise ConfigError(
                    f"compute.max_model_len is {max_model_len}, and the KV cache holds {capacity} "
                    "tokens; lower it, or raise compute.max_batched_token_mem (or, where that is "
                    "not set and the cache is a GPU's, compute.gpu_memory_utilization)."
                )
            max_model_len = capacity
        num_host_pages = self._least(int(settings.swap_space * 2**30) // self.page_bytes)
        return Limits(max_model_len, num_pages, num_host_pages)

    def cache(self, num_pages: int, num_host_pages: int = 0) -> PagedCache:
        pages = num_pages, num_host_pages
        return PagedCache(self.layout, self.formats, pages, self.device)

    def spec(
        self, limits: Limits, generates: bool, stall_after_s: float, overlaps: bool
    ) -> RunnerSpec:
        return RunnerSpec(
            vocab_size=self.config.shape.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=eos_token_ids(self.folder),
            kv_groups=self.groups,
            num_pages=limits.num_pages,
            num_host_pages=limits.num_host_pages,
            max_num_seqs=self.settings.max_num_seqs,
            max_step_tokens=self.max_step_tokens,
            stall_after_s=stall_after_s,
            overlaps=overlaps,
            pooling="" if self.pooling is None else self.pooling.kind,
            generates=generates,
            max_drafts=self.max_drafts if generates or not self.shard.is_last else 0,
            computes_drafts=self.drafter is not None or self.head is not None,
            num_stages=self.stages.count,
        )

    @property
    def max_drafts(self) -> int:
        most = self.drafts.max_drafts if self.drafts else 0
        return min(most, self.head.num_heads) if self.head and self.head.num_heads else most

    def _least(self, value: int) -> int:
        return self.stages.least(self.context.least(self.ranks.least(value)))

    def _num_pages(self, room_bytes: Callable[[], int]) -> int:
        settings, num_groups = self.settings, len(self.groups)
        if settings.max_batched_token_mem:
            return num_groups * -(-settings.max_batched_token_mem // settings.page_tokens)
        room = room_bytes()
        if room < self.page_bytes:
            raise ConfigError(
                "No memory is left for the KV cache; free some, choose a smaller model, raise "
                "compute.gpu_memory_utilization if it is a GPU's, or set "
                "compute.max_batched_token_mem to the number of tokens it shall hold."
            )
        pages_per_slot = num_groups * -(-self.max_positions // settings.page_tokens)
        return min(settings.max_num_seqs * pages_per_slot, room // self.page_bytes)


def choose_dtype(settings: ComputeSettings, device: torch.device) -> torch.dtype:
    """The dtype of the settings; auto is bfloat16 where the device is fast at it, else float32."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if settings.dtype != "auto":
        return named[settings.dtype]
    fast = device.type == "cuda" or is_fast_at_bf16()
    return torch.bfloat16 if fast else torch.float32


def has_room_for_dense(shape: DecoderShape) -> bool:
    """Whether weights in bfloat16 fit beside those of 8 bits, and leave most of the memory."""
    return shape.num_step_weights * 2 < available_memory() * CPU_MEMORY_SHARE


def cpu_room_bytes(num_processes: int) -> int:
    """Of one of so many ranks or stages on this host."""
    return int(available_memory() * CPU_MEMORY_SHARE) // num_processes


def choose_threads(
    settings: ComputeSettings, shape: DecoderShape, dtype: torch.dtype, num_processes: int = 1
) -> int:
    """Torch's threads: those of the settings, else as many as the weights keep busy.

    At most `max_threads`, or all cores but one, which is for the loop of this process and for the
    other services. Ranks and stages of a host share the cores and the weights.
    """
    if settings.num_threads:
        return settings.num_threads
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    weight_bytes = shape.num_row_weights * dtype.itemsize // num_processes
    most = min((cores - 1) // num_processes, settings.max_threads or cores)
    return max(1, min(most, weight_bytes // BYTES_PER_THREAD))


def keep_freed_memory(keep: bool) -> None:
    """Say whether large blocks stay in the process when they are freed.

    While a model is loaded they should not: 313 million weights in 8 bits took 514 to 797 MiB where
    they did, and 359 where they did not (benchmarks/results/loading.md). While it runs they should,
    as glibc gets them back page by page: an RMS norm over 512 tokens took 1.27 ms so and 0.14 ms
    with memory that stayed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30 if keep else 1 << 20)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1 if keep else 1 << 20)
