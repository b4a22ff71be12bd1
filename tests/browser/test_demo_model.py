"""The demo model's own calls and thoughts on the page: nothing scripted, drawn greedily."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.stack import Stack
from tests.browser.visit import Visit


async def results(visit: Visit, index: int) -> list[dict[str, Any]]:
    """What the tools answered to the calls of one answer."""
    shown = visit.answer(index).locator(".call-result code")
    return [json.loads(text) for text in await shown.all_inner_texts()]


async def test_the_model_calls_a_tool_and_says_its_result(visit: Visit, demo_stack: Stack) -> None:
    await visit.open(demo_stack.url)
    await visit.settings(temperature=0, calculator=True)
    await visit.ask("What is 12 * 34?")
    await visit.wait_until_done()
    assert await visit.page.locator(".answer").count() == 2
    assert await visit.answer(0).locator(".call-name").all_inner_texts() == ["calculator"]
    assert await results(visit, 0) == [{"result": "408"}]
    assert "408" in await visit.answer().locator(".content").inner_text()


@pytest.mark.parametrize("name", ["localhost", "slipstream.localhost"])  # and 127.0.0.1 above
async def test_the_page_works_under_every_name_of_this_machine(
    visit: Visit, demo_stack: Stack, name: str
) -> None:
    await visit.open(f"http://{name}:{demo_stack.port}")
    await visit.settings(temperature=0)
    await visit.ask("Hello!")
    await visit.wait_until_done()
    assert await visit.answer().locator(".content").inner_text()


async def test_the_model_calls_twice_at_once_and_says_both_results(
    visit: Visit, demo_stack: Stack
) -> None:
    await visit.open(demo_stack.url)
    await visit.settings(temperature=0, calculator=True, get_weather=True)
    await visit.ask("What is the weather in Paris and in Rome?")
    await visit.wait_until_done()
    assert await visit.page.locator(".answer").count() == 2
    assert await visit.answer(0).locator(".call-name").all_inner_texts() == ["get_weather"] * 2
    paris, rome = await results(visit, 0)
    assert (paris["city"], rome["city"]) == ("Paris", "Rome")
    said = await visit.answer().locator(".content").inner_text()
    for weather in (paris, rome):
        assert weather["city"] in said and str(weather["temperature_c"]) in said


async def test_the_model_thinks_where_it_is_told_to_and_its_thought_is_folded(
    visit: Visit, demo_stack: Stack
) -> None:
    await visit.open(demo_stack.url)
    await visit.settings(temperature=0, reasoning="on", logprobs=True)
    await visit.ask("What is 17 plus 25?")
    await visit.wait_until_done()
    reasoning = visit.answer().locator(".reasoning")
    assert await reasoning.get_attribute("open") is None
    await reasoning.locator("summary").click()
    thought = await reasoning.locator(".reasoning-text").inner_text()
    answer = await visit.answer().locator(".content").inner_text()
    assert "17 and 25" in thought and thought not in answer and "42" in answer
    tokens = visit.answer().locator(".token")
    assert "".join(await tokens.all_inner_texts()) == answer
    await tokens.first.focus()  # it has alternatives of its own alone, not of the thought's end
    assert await visit.page.locator("#tip ul").count() == 1
    await visit.answer().locator(".stages summary").click()
    assert "of them reasoning" in await visit.answer().locator(".numbers").inner_text()

    await visit.settings(reasoning="off")
    await visit.ask("What is 17 plus 25?")
    await visit.wait_until_done()
    assert "42" in await visit.answer().locator(".content").inner_text()
    assert await visit.answer().locator(".reasoning").is_hidden()
