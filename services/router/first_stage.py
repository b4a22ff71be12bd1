"""Where a request begins its way round the ring: at the tokenizer, or at compute with its ids."""

from __future__ import annotations

from common.messages.address import Address
from common.messages.generate import Generate
from common.messages.tokenize import IdsPrompt, OutputRules, Tokenize
from common.tokenized import ExpectedAnswer, generate_messages


def first_stage(message: Tokenize) -> tuple[Address, Tokenize | Generate]:
    """Return the first station of a prompt and what it gets.

    Ids, which the router has checked, go straight to compute. Whatever is to be refused, cut,
    lowered or composed goes to the tokenizer, which does that.
    """
    prompt, route = message.prompt, message.route
    if not isinstance(prompt, IdsPrompt) or not _is_settled(message, len(prompt.ids)):
        return route.tokenizer, message
    runs = [(0, message.num_choices)]
    (generate,) = generate_messages(
        message, prompt.ids, ExpectedAnswer(), message.sampling, runs, message.traceparent
    )
    return route.compute, generate


def _is_settled(message: Tokenize, num_ids: int) -> bool:
    """Whether so many ids and what is to follow them fit as they are, without rules."""
    limits = message.limits
    num_new = 0 if message.pooling else message.sampling.max_tokens
    if not (num_new or message.pooling):  # as many as fit
        return False
    bounds = (
        (message.truncate_to, num_ids),
        (limits.max_input_length, num_ids),
        (limits.max_output_length, num_new),
        (limits.max_model_len, num_ids + num_new),
    )
    return message.rules == OutputRules() and not any(0 < most < num for most, num in bounds)
