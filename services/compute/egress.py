"""What goes out after a step: one message for each detokenizer, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages.address import Address
from common.messages.token_rows import TokenRows
from common.messages.tokens import TokensGenerated
from services.compute.scheduler.protocol import SequenceEvent


def step_mail(
    step_id: int, events: Iterable[SequenceEvent]
) -> list[tuple[Address, TokensGenerated]]:
    """Sort a step's events into mail by detokenizer."""
    builders: dict[Address, TokenRows] = {}
    for event in events:
        builder = builders.get(event.detokenizer)
        if builder is None:
            builder = builders[event.detokenizer] = TokenRows(step_id)
        builder.add(
            event.attempt,
            event.first_index,
            event.token_ids,
            event.logprobs or None,
            event.header if event.opened else None,
            (event.prompt_tokens, event.cached_tokens),
        )
        ending = event.ending
        if ending is not None:
            builder.end(
                event.header, ending.reason, ending.usage, ending.stop_token_id, ending.failure
            )
    return [(detokenizer, builder.build()) for detokenizer, builder in builders.items()]
