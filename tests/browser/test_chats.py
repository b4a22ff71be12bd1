"""Several conversations: opened, named, searched, deleted and brought back, exported, imported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import PHONE, Visit

if TYPE_CHECKING:
    from playwright.async_api import Browser

TITLES = ".chat-title"
FOCUSED = "document.activeElement.textContent.trim()"
FILL = """() => {
  let text = "x".repeat(1 << 20);
  for (let part = 0; text; part += 1) {
    try { localStorage.setItem(`filler ${part}`, text); }
    catch { text = text.slice(text.length / 2 + 1); }
  }
}"""


async def two_conversations(visit: Visit, scripted: ScriptedServer) -> None:
    """Have two, with the list of them open."""
    await visit.open(scripted.url)
    await visit.talk(scripted, "How do whales sleep?", "With half of their brain.")
    await visit.page.click("#new-chat")
    await visit.talk(scripted, "Do birds dream?", "They do.")
    await visit.page.click("#open-chats")


async def choose(visit: Visit, title: str, action: str) -> None:
    """Do something out of a conversation's menu."""
    await visit.page.get_by_label(f"Rename, export or delete “{title}”").click()
    await visit.page.click(f"#chat-menu [data-do='{action}']")


async def exported(visit: Visit, selector: str, folder: Path) -> str:
    """Click there, and return the text of the file that comes."""
    async with visit.page.expect_download() as download:
        await visit.page.click(selector)
    file = await download.value
    await file.save_as(folder / file.suggested_filename)
    return await asyncio.to_thread((folder / file.suggested_filename).read_text)


async def test_a_conversation_is_opened_from_the_list_and_gone_on_with(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await two_conversations(visit, scripted)
    page = visit.page
    titles = await page.locator(TITLES).all_inner_texts()
    assert titles == ["Do birds dream?", "How do whales sleep?"]
    await page.click("text=How do whales sleep?")
    await visit.wait_for_text("half of their brain")
    await visit.ask("And seals?")
    stream = await scripted.asked()
    asked = [message["content"] for message in stream.body["messages"]]
    assert asked == ["How do whales sleep?", "With half of their brain.", "And seals?"]
    await stream.finish()
    await visit.wait_until_done()
    await visit.open(scripted.url)  # the one that was open last
    assert await page.locator(".bubble").last.inner_text() == "And seals?"


async def test_a_title_can_be_changed(visit: Visit, scripted: ScriptedServer) -> None:
    await two_conversations(visit, scripted)
    await choose(visit, "Do birds dream?", "rename")
    await visit.page.keyboard.type("Birds")
    await visit.page.keyboard.press("Enter")
    assert await visit.page.evaluate(FOCUSED) != ""
    await choose(visit, "How do whales sleep?", "rename")
    await visit.page.keyboard.type("not this")
    await visit.page.keyboard.press("Escape")
    await visit.open(scripted.url)
    await visit.page.click("#open-chats")
    titles = await visit.page.locator(TITLES).all_inner_texts()
    assert titles == ["Birds", "How do whales sleep?"]


async def test_searching_looks_into_the_texts(visit: Visit, scripted: ScriptedServer) -> None:
    await two_conversations(visit, scripted)
    await visit.page.fill("#chat-search", "BRAIN half")
    assert await visit.page.locator(TITLES).all_inner_texts() == ["How do whales sleep?"]
    assert "half of their brain" in await visit.page.locator(".chat-open .hint").inner_text()
    await visit.page.fill("#chat-search", "nowhere")
    assert "Nothing has “nowhere” in it." in await visit.page.locator("#chat-list").inner_text()


async def test_a_deleted_conversation_can_be_brought_back(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await two_conversations(visit, scripted)
    page = visit.page
    await choose(visit, "Do birds dream?", "delete")  # the one that is open
    assert await page.locator("#log > *").count() == 0
    assert await page.locator(TITLES).all_inner_texts() == ["How do whales sleep?"]
    assert await page.evaluate(FOCUSED) == "Undo"
    await page.keyboard.press("Enter")
    await visit.wait_for_text("They do.")
    assert await page.locator(TITLES).count() == 2
    await choose(visit, "How do whales sleep?", "delete")
    assert "Deleted “How do whales sleep?”" in await page.locator("#chat-message").inner_text()
    await visit.open(scripted.url)
    await page.click("#open-chats")
    assert await page.locator(TITLES).all_inner_texts() == ["Do birds dream?"]


async def test_a_conversation_deleted_while_it_streams_stays_deleted(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.page.set_viewport_size({"width": 1300, "height": 800})
    await visit.open(scripted.url)
    await visit.ask("Count")
    stream = await scripted.asked()
    await stream.delta(content="One")
    await visit.wait_for_text("One")
    await choose(visit, "Count", "delete")
    async with asyncio.timeout(10):
        await scripted.left.wait()
    await visit.page.wait_for_selector("#send:not([hidden])")
    assert await visit.page.locator(TITLES).count() == 0
    await visit.page.click("text=Undo")
    await visit.wait_for_text("One")
    assert await visit.page.locator(TITLES).all_inner_texts() == ["Count"]


async def test_what_is_exported_can_be_imported(
    visit: Visit, scripted: ScriptedServer, tmp_path: Path
) -> None:
    await two_conversations(visit, scripted)
    page = visit.page
    text = await exported(visit, "#export-all", tmp_path)
    assert len(json.loads(text)["chats"]) == 2
    await page.get_by_label("Rename, export or delete “Do birds dream?”").click()
    markdown = await exported(visit, "[data-do='markdown']", tmp_path)
    assert markdown == (
        "# Do birds dream?\n\n## Question\n\nDo birds dream?\n\n## Answer of scripted\n\nThey do.\n"
    )
    for title in ("Do birds dream?", "How do whales sleep?"):
        await choose(visit, title, "delete")
    file = {"name": "all.json", "mimeType": "application/json", "buffer": text.encode()}
    await page.set_input_files("#import-file", [file])
    await page.locator("#chat-message", has_text="Imported 2 conversations.").wait_for()
    await page.click("text=How do whales sleep?")
    await visit.wait_for_text("half of their brain")
    bad = {**file, "buffer": text.replace('"parent": 0', '"parent": 7').encode()}
    await page.set_input_files("#import-file", [bad])
    said = page.locator("#chat-message", has_text="all.json was not imported")
    assert "chats[0]: turns[1].parent" in await said.inner_text()
    assert await page.locator(TITLES).count() == 2


async def test_two_tabs_have_the_same_list(visit: Visit, scripted: ScriptedServer) -> None:
    await two_conversations(visit, scripted)
    other = await Visit.begin(visit.page.context)
    await other.open(scripted.url)
    await other.page.click("#new-chat")
    await other.talk(scripted, "From another tab", "Yes")
    await visit.page.locator(TITLES, has_text="From another tab").wait_for()
    assert await visit.page.locator(TITLES).count() == 3
    other.check_clean()


async def test_a_full_storage_is_said_and_the_conversation_goes_on(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.page.evaluate(FILL)
    await visit.talk(scripted, "A question", "An answer. " * 100)
    notice = visit.page.locator("#notice-kept")
    assert "no room" in await notice.inner_text()
    await visit.page.evaluate("localStorage.removeItem('filler 0')")
    await visit.talk(scripted, "Another", "It fits now.")
    assert await notice.is_hidden()


async def test_on_a_phone_the_list_lies_over_the_conversation(
    browser: Browser, scripted: ScriptedServer
) -> None:
    context = await browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    visit = await Visit.begin(context)
    await two_conversations(visit, scripted)
    assert await visit.page.evaluate("chats.matches(':modal')")
    assert await visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    await visit.page.click("text=How do whales sleep?")
    await visit.wait_for_text("half of their brain")
    assert not await visit.page.evaluate("chats.open")
    await visit.page.click("#open-chats")
    await visit.page.keyboard.press("Escape")
    await visit.page.wait_for_selector("#open-chats[aria-expanded='false']")
    await context.close()
    visit.check_clean()


async def test_on_a_wide_screen_the_list_stands_beside_it(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.page.set_viewport_size({"width": 1300, "height": 800})
    await visit.open(scripted.url)
    assert await visit.page.evaluate("chats.open && !chats.matches(':modal')")
    assert await visit.page.evaluate("document.activeElement.id") == "question"
    await visit.talk(scripted, "A question", "An answer")
    assert await visit.page.locator(TITLES).all_inner_texts() == ["A question"]
    await visit.page.click("#close-chats")
    await visit.open(scripted.url)
    assert not await visit.page.evaluate("chats.open")
