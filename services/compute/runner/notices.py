"""What a model's config.json asks for and does not get, said in the log when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from common.architectures import language_fields
from common.quantization import has_fp8_cache
from common.sizes import dual_chunk_limit
from services.compute.config import ComputeSettings


def log_notices(raw: Mapping[str, Any], settings: ComputeSettings) -> None:
    log = structlog.get_logger()
    if has_fp8_cache(raw) and settings.kv_cache_dtype == "auto":
        log.warning(
            "the checkpoint was made for a KV cache in FP8, which is not the default: "
            "--kv-cache-dtype fp8 gives it one, in half the memory"
        )
    if limit := dual_chunk_limit(language_fields(raw)):
        log.warning(
            "dual_chunk_attention_config is not supported: texts end where it would matter",
            max_model_len=limit,
        )
