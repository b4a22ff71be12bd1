"""Settings of the tokenizer service."""

from __future__ import annotations

from typing import Literal, TypeAlias

from common.chat_formats import ReasoningFormatName, ToolFormatName
from common.config import Settings

ToolFormatSetting: TypeAlias = Literal["auto", "none"] | ToolFormatName
ReasoningFormatSetting: TypeAlias = Literal["auto", "none"] | ReasoningFormatName

# What well-known templates read: whether and how much to think, documents, dates, built-in tools.
WELL_KNOWN_TEMPLATE_KWARGS = (
    "add_vision_id",
    "available_tools",
    "builtin_tools",
    "citations",
    "clear_thinking",
    "controls",
    "date_string",
    "documents",
    "enable_thinking",
    "force_reasoning",
    "keep_past_thinking",
    "length",
    "model_identity",
    "preserve_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
    "tools_in_user_message",
)


class TokenizerSettings(Settings):
    """The `[tokenizer]` table."""

    pool_size: int = 0  # processes that render and encode; default: 2, or 4 from 16 cores on
    max_prompt_bytes: int = 8 << 20  # of one prompt, as it comes in and as it is rendered
    max_structure_bytes: int = 256 << 10  # of a schema or grammar, before anything reads it
    max_pending_requests: int = 1024  # in work or waiting for a process, before refusing
    max_pending_bytes: int = 64 << 20  # of all prompts in work or waiting
    template_timeout_s: float = 5.0  # rendering of one chat template, before its process is killed
    template_memory_mb: int = 256  # that rendering may allocate
    encode_timeout_s: float = 30.0  # encoding of one prompt, before its process is killed
    chat_template: str = ""  # a file with a template; default: the model folder's own
    tool_format: ToolFormatSetting = "auto"  # auto: read off the model's chat template
    reasoning_format: ReasoningFormatSetting = "auto"
    # Variables of the chat template that requests may set.
    template_kwargs: tuple[str, ...] = WELL_KNOWN_TEMPLATE_KWARGS
    grace_s: float = 30.0
