"""What the guide's process is told; it travels as JSON on its command line."""

from __future__ import annotations

from pydantic import Field

from common.config import Settings


class GuideSettings(Settings):
    """The model's side of masks, and the limits of what a grammar may cost.

    `folder` may be without a tokenizer.json: then there are no grammars, but lists of tokens.
    """

    folder: str
    vocab_size: int = Field(ge=1)  # width of the logits
    eos_token_ids: tuple[int, ...]
    num_slots: int = Field(ge=1)
    compile_timeout_s: float = 5.0
    step_timeout_s: float = 10.0
    memory_mb: int = 1024  # of the process, beside what the tokenizer takes
    max_grammar_bytes: int = 1 << 20
    cores: tuple[int, ...] = ()  # that the process may use; none: those of its parent
    cache_entries: int = 256
    cache_bytes: int = 4 << 20  # of grammars' text; compiled they take 70 to 95 times as much
