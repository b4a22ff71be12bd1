"""Answers of a real server on the page: they stream, stop, come again, and outlive a reload."""

from __future__ import annotations

import asyncio
import re

from benchmarks.stack import Stack
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import Visit
from tests.patience import PATIENCE_S
from tests.system.ring import wait_empty

FIGURES = re.compile(r"TTFT [\d.]+ m?s · [\d.]+ tokens/s · \d+ tokens · [\d.]+ m?s")


async def test_an_answer_streams_and_its_figures_are_shown(visit: Visit, demo_stack: Stack) -> None:
    await visit.open(demo_stack.url)
    await visit.ask("Tell me a story.")
    await visit.wait_until_done()
    figures = await visit.answer().locator(".figures").inner_text()
    assert FIGURES.fullmatch(figures.replace("\u00a0", " "))


async def test_the_stages_of_an_answer_are_those_of_all_four_services(
    visit: Visit, demo_stack: Stack
) -> None:
    await visit.open(demo_stack.url)
    await visit.ask("What is the capital of France?")
    await visit.wait_for_text("Paris")
    await visit.wait_until_done()
    stages = visit.answer().locator(".stages")
    await stages.locator("summary").click()
    await stages.locator(".lane").first.wait_for()
    names = await stages.locator(".lane-name").all_inner_texts()
    assert [name for name in names if name != "compute device"] == [
        "tokenizer",
        "compute host",
        "detokenizer",
        "router",
    ]
    tokenizer = stages.locator(".lane").first
    assert "tokenize 1 × " in await tokenizer.inner_text()
    numbers = await stages.locator(".numbers").inner_text()
    assert re.search(r"Until the first token\s+[\d.]+ m?s", numbers)
    assert re.search(r"Prompt\s+\d+ tokens", numbers)


async def test_stop_ends_the_answer_and_the_server_frees_it(
    visit: Visit, locked_stack: Stack
) -> None:
    visit.expected_network_errors = 1  # the key
    await visit.open(locked_stack.url, ready=False)
    await visit.unlock()
    await visit.page.wait_for_selector("#model:not([disabled])")
    await visit.ask("Go on and on")
    await visit.answer().locator(".figures", has_text="tokens/s").wait_for()
    await visit.page.click("#stop")
    await visit.wait_until_done()
    assert await visit.answer().locator(".note").inner_text() == "Stopped."
    assert await visit.answer().locator(".content").inner_text() != ""
    assert "≈" not in await visit.answer().locator(".figures").inner_text()  # counted by the server
    await asyncio.to_thread(wait_empty, locked_stack)


async def test_regenerate_asks_the_same_again(visit: Visit, scripted: ScriptedServer) -> None:
    await visit.open(scripted.url)
    await visit.ask("One question")
    first = await scripted.asked()
    await first.delta(content="First answer")
    await first.finish()
    await visit.wait_until_done()
    await visit.page.click("text=Regenerate")
    second = await scripted.asked()
    assert second.body["messages"] == [{"role": "user", "content": "One question"}]
    await second.delta(content="Second answer")
    await second.finish()
    await visit.wait_until_done()
    assert await visit.page.locator(".answer").count() == 1
    await visit.wait_for_text("Second answer")


async def test_an_edited_question_takes_the_place_of_the_old_one(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    for text in ("One", "Two"):
        await visit.ask(text)
        stream = await scripted.asked()
        await stream.delta(content=f"To {text}")
        await stream.finish()
        await visit.wait_until_done()
    await visit.page.locator("[data-action='edit']").last.click()
    assert await visit.page.input_value("#question") == "Two"
    await visit.ask("Three")
    stream = await scripted.asked()
    assert [message["content"] for message in stream.body["messages"]] == ["One", "To One", "Three"]
    await stream.delta(content="To Three")
    await stream.finish()
    await visit.wait_until_done()
    assert await visit.page.locator(".bubble").all_inner_texts() == ["One", "Three"]


async def test_a_conversation_outlives_a_reload(visit: Visit, demo_stack: Stack) -> None:
    await visit.open(demo_stack.url)
    await visit.ask("What is the capital of France?")
    await visit.wait_until_done()
    figures = await visit.answer().locator(".figures").inner_text()
    await visit.open(demo_stack.url)
    await visit.wait_for_text("Paris")
    assert await visit.answer().locator(".figures").inner_text() == figures
    await visit.page.click("#new-chat")
    assert await visit.page.locator("#log > *").count() == 0
    await visit.open(demo_stack.url)
    assert await visit.page.locator("#log > *").count() == 0


async def test_an_answer_cut_off_by_a_reload_says_so(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("Count")
    stream = await scripted.asked()
    await stream.delta(content="One, two")
    await visit.wait_for_text("One, two")
    await visit.open(scripted.url)
    await visit.wait_for_text("One, two")
    assert "Interrupted" in await visit.answer().locator(".note").inner_text()
    async with asyncio.timeout(PATIENCE_S):
        await scripted.left.wait()


async def test_a_new_chat_ends_the_answer_that_streams(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("Old")
    stream = await scripted.asked()
    await stream.delta(content="Old answer")
    await visit.wait_for_text("Old answer")
    await visit.page.click("#new-chat")
    async with asyncio.timeout(PATIENCE_S):
        await scripted.left.wait()
    await visit.page.wait_for_selector("#send:not([hidden])")
    await visit.ask("New")
    stream = await scripted.asked()
    assert stream.body["messages"] == [{"role": "user", "content": "New"}]
    await stream.delta(content="New answer")
    await stream.finish()
    await visit.wait_until_done()
    assert await visit.page.locator(".answer .content").all_inner_texts() == ["New answer"]


async def test_only_the_last_answer_can_be_made_again(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    for text in ("One", "Two"):
        await visit.ask(text)
        stream = await scripted.asked()
        await stream.delta(content=f"To {text}")
        await stream.finish()
        await visit.wait_until_done()
    assert await visit.page.locator("text=Copy >> visible=true").count() == 2
    assert await visit.page.locator("text=Regenerate >> visible=true").count() == 1


async def test_text_is_whole_wherever_the_bytes_are_cut(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("Say it")
    stream = await scripted.asked()
    await stream.delta(content="begin ")
    await visit.wait_for_text("begin")
    text = 'data: {"choices":[{"index":0,"delta":{"content":"größer 🌊 東京"}}]}\r\n\r\n'.encode()
    for at in range(len(text)):
        await stream.raw(text[at : at + 1])
        if not text[at : at + 1].isascii():
            await visit.page.evaluate("1")  # time for the page to read what is there
    await stream.finish()
    await visit.wait_until_done()
    await visit.wait_for_text("begin größer 🌊 東京")


async def test_a_long_answer_is_drawn_without_drawing_it_all_again(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("Much")
    stream = await scripted.asked()
    await stream.delta(content="# Much\n\nfirst paragraph\n\n")
    await visit.wait_for_text("first paragraph")
    await visit.page.evaluate("document.querySelector('.content h2').dataset.seen = 'yes'")
    for number in range(300):
        await stream.delta(content=f"paragraph {number} with **words**\n\n- one\n- two\n\n")
    await stream.delta(content="```python\n")
    for number in range(500):
        await stream.delta(content=f"line_{number} = {number}\n")
    await stream.delta(content="```\nlast words")
    await stream.finish()
    await visit.wait_until_done()
    await visit.wait_for_text("last words")
    content = visit.answer().locator(".content")
    assert await content.locator("h2[data-seen]").count() == 1
    assert await content.locator("ul").count() == 300
    code = await content.locator("pre code").inner_text()
    assert code.splitlines() == [f"line_{number} = {number}" for number in range(500)]
    assert await visit.page.evaluate("scroller.scrollHeight - scroller.scrollTop <= innerHeight")
