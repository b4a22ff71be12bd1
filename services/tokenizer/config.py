"""Settings of the tokenizer service."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from pydantic import Field

from common.chat_formats import ReasoningFormatName, ToolFormatName
from common.config import GRACE, Settings

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

    pool_size: int = Field(
        0, description="processes that render and encode (default: 2, or 4 from 16 cores on)"
    )
    max_prompt_bytes: int = Field(
        8 << 20, description="size of one prompt, both as it comes in and as it is rendered"
    )
    max_chars_per_token: int = Field(
        32,
        description="characters a token may stand for on average: a prompt that would be too long "
        "even so is refused before it is encoded; 0 encodes all",
    )
    max_structure_bytes: int = Field(256 << 10, description="size of one schema or grammar")
    max_pending_requests: int = Field(
        1024, description="requests in work or waiting; more are refused"
    )
    max_pending_bytes: int = Field(
        64 << 20, description="size of all prompts in work or waiting; more are refused"
    )
    template_timeout_s: float = Field(
        5.0, description="to render a chat template, before its process is killed"
    )
    template_memory_mb: int = Field(256, description="memory that rendering may take")
    encode_timeout_s: float = Field(
        30.0, description="to encode a prompt, before its process is killed"
    )
    chat_template: str = Field(
        "", description="a Jinja template to use in place of the model's own"
    )
    tool_format: ToolFormatSetting = Field(
        "auto",
        description="how the model writes tool calls; auto reads it off the model's chat template",
    )
    reasoning_format: ReasoningFormatSetting = Field(
        "auto",
        description="how the model writes reasoning; auto reads it off the model's chat template",
    )
    template_kwargs: tuple[str, ...] = Field(
        WELL_KNOWN_TEMPLATE_KWARGS,
        description="variables of the chat template that requests may set",
    )
    grace_s: float = Field(30.0, description=GRACE)

    @property
    def num_processes(self) -> int:
        return self.pool_size or (4 if (os.cpu_count() or 1) >= 16 else 2)
