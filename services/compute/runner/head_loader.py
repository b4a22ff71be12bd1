"""Loads the head that drafts for a model that is loaded, and says what it keeps of a text."""

from __future__ import annotations

from collections.abc import Iterator

from common.head_folder import HeadFolder
from common.quantization import read_quantization
from services.compute.kernels.kv.kv_format import LayerFormat
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
from services.compute.runner.model_loader import ModelLoader


def build_head(
    loader: ModelLoader, folder: HeadFolder, ends: ModelEnds, make_linear: LinearMaker[LinearMap]
) -> tuple[DraftHead, ...] | MedusaHeads:
    """Of next-token layers a head each, of which every one sees what the one before it makes."""
    source = _source(loader, folder, ends, make_linear)
    if folder.method == "medusa":
        return build_medusa(source, folder.num_heads, folder.num_blocks)
    if folder.method == "mtp":
        return tuple(_next_token(loader, source, folder.num_layers))
    return ((build_eagle3 if folder.method == "eagle3" else build_eagle)(source),)


def head_format(loader: ModelLoader, folder: HeadFolder) -> LayerFormat:
    """Of its layer's keys and values in a page."""
    shape, width, latent_dim = folder.shape, folder.shape.head_dim, 0
    if shape.latent is not None:
        width, latent_dim = shape.latent.entry_dim, shape.latent.latent_dim
    sizes = shape.num_kv_heads, loader.settings.page_tokens, width, loader.dtype
    return LayerFormat(*sizes, loader.dtype, latent_dim)


def _source(
    loader: ModelLoader, folder: HeadFolder, ends: ModelEnds, make_linear: LinearMaker[LinearMap]
) -> HeadSource:
    about = folder.shape, folder.raw
    if folder.method == "mtp" or loader.settings.load_format == "dummy":
        return HeadSource(*about, loader.weights(), None, make_linear, ends)
    files = SafetensorsFiles(folder.folder, loader.device, format_of(read_quantization(folder.raw)))
    weights = loader.quantized(CheckpointWeights(files, loader.dtype, loader.device))
    return HeadSource(*about, weights, files, make_linear, ends)


def _next_token(loader: ModelLoader, source: HeadSource, num_layers: int) -> Iterator[DraftHead]:
    config, make_layers = loader.config, loader.config.family.next_token_layers
    if make_layers is None:
        raise ValueError("a family without such layers was refused before")
    eps = float(getattr(config.fields, "rms_norm_eps", 1e-6))
    for number in range(num_layers):
        make: Builder[LinearMap] = source.builder()
        make_layer = make_layers(config.fields, make)
        yield build_next_token(source.ends, make, make_layer, eps, number)
    source.weights.skip("")  # the model's own, and layers behind those that are used
    source.weights.finish()
