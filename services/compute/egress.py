"""What goes out after a step: one message for each detokenizer, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages.address import Address
from common.messages.token_rows import TokenRows
from common.messages.tokens import TokensGenerated
from services.compute.scheduler.protocol import News, SequenceEvent, StepTokens


def step_messages(step_id: int, news: Iterable[News]) -> list[tuple[Address, TokensGenerated]]:
    """Sort a step's news into mail by detokenizer."""
    builders: dict[Address, TokenRows] = {}
    for item in news:
        builder = builders.get(item.detokenizer)
        if builder is None:
            builder = builders[item.detokenizer] = TokenRows(step_id)
        match item:
            case StepTokens():
                builder.extend(
                    item.router,
                    item.counter_S.tobytes(),
                    item.index_S.tobytes(),
                    item.token_S.tobytes(),
                )
            case SequenceEvent():
                _add(builder, item)
    return [(detokenizer, builder.build()) for detokenizer, builder in builders.items()]


def _add(builder: TokenRows, event: SequenceEvent) -> None:
    builder.add(
        event.attempt,
        event.first_index,
        event.token_ids,
        event.logprobs or None,
        event.header if event.opened else None,
        (event.prompt_tokens, event.cached_tokens),
    )
    for scores in event.scored:
        builder.score(scores)
    ending = event.ending
    if ending is not None:
        builder.end(event.header, ending.reason, ending.usage, ending.stop_token_id, ending.failure)
        if ending.embedding:
            builder.embed(ending.embedding)
