"""What goes out after a step: one message for each detokenizer, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterable

from common.messages.address import Address
from common.messages.tokens import TokensGenerated
from services.compute.scheduler.protocol import News, SequenceEvent, StepTokens


def step_messages(step_id: int, news: Iterable[News]) -> list[tuple[Address, TokensGenerated]]:
    """Sort a step's news into messages by detokenizer."""
    messages: dict[Address, TokensGenerated] = {}
    for item in news:
        message = messages.get(item.detokenizer)
        if message is None:
            message = messages[item.detokenizer] = TokensGenerated(step_id)
        match item:
            case StepTokens():
                message.extend(
                    item.router,
                    item.counter_S.tobytes(),
                    item.index_S.tobytes(),
                    item.token_S.tobytes(),
                )
            case SequenceEvent():
                _add(message, item)
    return list(messages.items())


def _add(message: TokensGenerated, event: SequenceEvent) -> None:
    message.add(
        event.attempt,
        event.first_index,
        event.token_ids,
        event.logprobs,
        event.header if event.opened else None,
        (event.prompt_tokens, event.cached_tokens),
    )
    for scores in event.scored:
        message.score(scores)
    ending = event.ending
    if ending is not None:
        message.end(event.header, ending)
