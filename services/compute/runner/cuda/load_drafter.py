"""Loads what drafts on a GPU: nothing, a small model, or a head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from common.errors import ConfigError
from common.head_folder import HeadFolder
from common.speculative import WHERE
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS
from services.compute.layers.weighted_layers import AnyLinear, KernelLinears
from services.compute.models.decoder import Decoder
from services.compute.models.draft_head import ModelEnds
from services.compute.models.head_decoder import head_decoder
from services.compute.models.medusa import MedusaHeads
from services.compute.quantization.packed import Weight
from services.compute.runner.cuda.drafter import DrafterMaker, MachineParts
from services.compute.runner.cuda.head_passes import HeadPasses, LayerHeads
from services.compute.runner.cuda.medusa_passes import MedusaPasses
from services.compute.runner.cuda.model_passes import ModelPasses, SmallModel
from services.compute.runner.cuda.pass_drafter import PassDrafter
from services.compute.runner.cuda.text_drafter import TextDrafter
from services.compute.runner.head_loader import build_head, head_format
from services.compute.runner.model_loader import ModelLoader


def check_drafter(loader: ModelLoader) -> None:
    """Raise ConfigError for a model of whose text nothing keeps all pages, if they are needed."""
    has_weights = loader.drafter is not None or loader.head is not None
    if has_weights and not any(span.is_full for span in loader.layout.spans):
        raise ConfigError(
            f"{WHERE}: no layer of this model sees its whole text, whose pages a draft model or a "
            "head needs on a GPU; take the method ngram."
        )


def load_drafter(
    loader: ModelLoader, model: Decoder[AnyLinear], make_linear: KernelLinears
) -> DrafterMaker:
    """What drafts for a model that is loaded, with its weights: all of it, on each rank."""
    if loader.drafter is None and loader.head is None:
        return TextDrafter
    if make_linear.num_segments:
        make_linear = replace(make_linear, num_segments=NUM_SEGMENTS)
    if loader.head is not None:
        return _head(loader, loader.head, model, make_linear)
    small = loader.drafter
    assert small is not None
    linears = KernelLinears(small.dtype, make_linear.keeps_dense, make_linear.num_segments)
    about = small.layout, small.cache, loader.settings.batch_invariant
    return partial(PassDrafter, partial(ModelPasses, SmallModel(small.decoder(linears), *about)))


@dataclass(frozen=True)
class _KeptLinears(KernelLinears):
    """Remembers what it makes."""

    made: list[AnyLinear] = field(default_factory=list)

    def __call__(
        self, weight: Weight, bias_O: torch.Tensor | None, dense_OI: torch.Tensor | None = None
    ) -> AnyLinear:
        self.made.append(linear := KernelLinears.__call__(self, weight, bias_O, dense_OI))
        return linear

    def summed(self, weight: Weight, bias_O: torch.Tensor | None, num_inputs: int) -> AnyLinear:
        self.made.append(linear := KernelLinears.summed(self, weight, bias_O, num_inputs))
        return linear


def _head(
    loader: ModelLoader, folder: HeadFolder, model: Decoder[AnyLinear], linears: KernelLinears
) -> DrafterMaker:
    assert model.norm is not None
    weight_VE = model.embedding.weight_VE
    ends = ModelEnds(model.shape, weight_VE, model.norm, model.head)
    make_linear = _KeptLinears(linears.dtype, linears.keeps_dense, linears.num_segments)
    heads = build_head(loader, folder, ends, make_linear)
    if isinstance(heads, MedusaHeads):
        return partial(PassDrafter, partial(MedusaPasses, heads, loader.max_drafts))
    form, batch_invariant = head_format(loader, folder), loader.settings.batch_invariant
    about = folder.shape, tuple(make_linear.made)

    def make_passes(machine: MachineParts) -> HeadPasses:
        x_TE = torch.zeros_like(machine.decoder.hidden_TE)
        decoders = tuple(head_decoder(head, model, *about, x_TE) for head in heads)
        return HeadPasses(LayerHeads(decoders, form, batch_invariant), machine)

    return partial(PassDrafter, make_passes)
