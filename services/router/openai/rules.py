"""What an answer's tokens must obey, all together."""

from __future__ import annotations

from common.messages.tokenize import OutputRules, Structure
from services.router.openai.tools import Tools


def make_rules(
    structure: Structure | None = None,
    tools: Tools | None = None,
    thinking_budget: int = -1,
    allowed_token_ids: tuple[int, ...] = (),
    bad_words: tuple[str, ...] = (),
) -> OutputRules:
    """Bring all rules together."""
    use = None if tools is None else tools.use
    return OutputRules(structure, use, thinking_budget, allowed_token_ids, bad_words)
