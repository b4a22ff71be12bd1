"""The API as the `openai` package sees it, with a model that is really computed."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI, OpenAI

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}


def test_the_model_is_listed_and_found_by_its_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_is_answered_in_one_piece(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12, **GREEDY
    )
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_says_what_the_whole_one_says(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **GREEDY}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5


def test_a_predicted_answer_is_the_same_and_its_usage_says_what_was_right(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 48, **GREEDY}
    text = client.chat.completions.create(**asked).choices[0].message.content
    predicted = {**asked, "prediction": {"type": "content", "content": text}}
    answer = client.chat.completions.create(**predicted)
    assert answer.choices[0].message.content == text
    *chunks, last = client.chat.completions.create(
        **predicted, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    stopped = client.chat.completions.create(**predicted, stop=text[-9:-3])
    assert text.startswith(stopped.choices[0].message.content)
    for usage in (answer.usage, last.usage, stopped.usage):
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    assert answer.usage.completion_tokens == last.usage.completion_tokens == 48


def test_usage_comes_in_a_last_chunk_if_it_is_asked_for(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "stream": True, **GREEDY}
    *chunks, last = client.chat.completions.create(**asked, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**asked))


def test_three_choices_differ_and_come_back_with_the_same_seed(client: OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, n=3, seed=5, temperature=1.5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_three_streamed_choices_are_told_apart_by_their_index(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "n": 3, "seed": 5}
    whole = client.chat.completions.create(**asked)
    texts, reasons = ["", "", ""], {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_different_seeds_give_different_texts(client: OpenAI) -> None:
    texts = {
        client.completions.create(model=MODEL, prompt="One", max_tokens=16, seed=seed)
        .choices[0]
        .text
        for seed in range(4)
    }
    assert len(texts) == 4


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_text_and_is_not_shown(client: OpenAI, streamed: bool) -> None:
    asked = {"model": MODEL, "prompt": "One, two", "max_tokens": 40, **GREEDY}
    text = client.completions.create(**asked).choices[0].text
    stop = next(text[i : i + 3] for i in range(8, 30) if text.find(text[i : i + 3]) == i)
    expected = text[: text.index(stop)]
    if streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.completions.create(**asked, stop=[stop, "never said"], **options)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
        usage = last.usage
    else:
        answer = client.completions.create(**asked, stop=stop)
        choice, usage = answer.choices[0], answer.usage
        assert (choice.text, choice.finish_reason) == (expected, "stop")
    assert usage is not None
    assert usage.prompt_tokens == len(tokens_of(client, "One, two"))
    assert 1 <= usage.completion_tokens < 40


def test_chat_logprobs_have_a_token_each_and_candidates_best_first(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 8
    said = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert said.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        candidates = [each.logprob for each in token.top_logprobs]
        assert candidates == sorted(candidates, reverse=True)
        assert len(candidates) == 3
        assert token.logprob == candidates[0]  # greedy


def test_completion_logprobs_name_tokens_and_offsets(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two", max_tokens=6, logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 6
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0


def test_echo_repeats_the_prompt(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "Three, four", "max_tokens": 6, **GREEDY}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "Three, four" + plain


def test_a_prompt_may_be_ids_and_lists_of_either(client: OpenAI) -> None:
    texts = ["The capital", "A train leaves"]
    ids = [tokens_of(client, text) for text in texts]
    plain = [
        client.completions.create(model=MODEL, prompt=text, max_tokens=8, **GREEDY).choices[0].text
        for text in texts
    ]
    for prompt in (texts, ids):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, **GREEDY)
        assert [choice.text for choice in answer.choices] == plain
    single = client.completions.create(model=MODEL, prompt=ids[0], max_tokens=8, **GREEDY)
    assert single.choices[0].text == plain[0]


def test_text_survives_tokenize_and_detokenize(client: OpenAI) -> None:
    text = "Über den Wolken 🙂 東京, naïve\n\ttabs"
    ids = tokens_of(client, text)
    answer = client.post("/../detokenize", body={"tokens": ids}, cast_to=object)
    assert answer == {"prompt": text}


async def test_many_chats_at_once_get_the_answer_that_each_gets_alone(
    client: OpenAI, async_client: AsyncOpenAI
) -> None:
    import asyncio

    def asked(number: int) -> dict[str, object]:
        messages = [{"role": "user", "content": f"Number {number}" * (1 + number % 5)}]
        return {"model": MODEL, "messages": messages, "max_tokens": 10 + number, **GREEDY}

    alone = [
        client.chat.completions.create(**asked(i)).choices[0].message.content for i in range(8)
    ]
    together = await asyncio.gather(
        *(async_client.chat.completions.create(**asked(i % 8)) for i in range(24))
    )
    assert [each.choices[0].message.content for each in together] == alone * 3


def test_a_long_prompt_is_taken_from_the_cache_the_second_time(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "A cache of pages. " * 30, "max_tokens": 4, **GREEDY}
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached_tokens = second.usage.prompt_tokens_details.cached_tokens
    assert cached_tokens is not None
    assert cached_tokens >= second.usage.prompt_tokens - 16  # all full pages
    assert first.choices[0].text == second.choices[0].text


def tokens_of(client: OpenAI, text: str) -> list[int]:
    """Ask the server for the ids of a text."""
    answer = client.post("/../tokenize", body={"prompt": text}, cast_to=object)
    assert isinstance(answer, dict)
    assert answer["count"] == len(answer["tokens"])
    return list(answer["tokens"])
