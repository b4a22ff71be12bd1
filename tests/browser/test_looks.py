"""The page on a phone, in light and dark, and for those who want no motion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.stack import Stack
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import PHONE, Visit

if TYPE_CHECKING:
    from playwright.async_api import Browser

SMALL_TARGETS = """
() => [...document.querySelectorAll("button, select, input, textarea, summary, label.check")]
  .filter((each) => each.checkVisibility() && !(each.type === "checkbox"))
  .map((each) => [each.textContent.trim().slice(0, 20) || each.id, each.getBoundingClientRect()])
  .filter(([, box]) => box.height < 43.5 || box.width < 43.5)
  .map(([name, box]) => `${name}: ${box.width} x ${box.height}`)
"""
BACKGROUND = "getComputedStyle(document.documentElement).backgroundColor"


async def test_on_a_phone_nothing_is_wider_than_it_and_targets_are_large(
    browser: Browser, scripted: ScriptedServer
) -> None:
    context = await browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    visit = await Visit.begin(context)
    await visit.open(scripted.url)
    await visit.ask("A word of " + "m" * 200)
    stream = await scripted.asked()
    await stream.delta(content="First")
    await stream.finish()
    await visit.wait_until_done()
    await visit.page.click("text=Regenerate")  # with two versions there are most buttons
    stream = await scripted.asked()
    await stream.delta(content="x" * 300 + "\n\n```\n" + "wide code " * 40 + "\n```\n\n1. one")
    await stream.delta(content="\n\n| a | b |\n|---|---|\n" + "| wide cell " * 9 + "|\n\n")
    await stream.delta(content="$$" + " + x" * 60 + "$$\n\nend")
    await stream.finish("length")
    await visit.wait_until_done()
    assert await visit.page.locator("text=Continue").is_visible()
    assert await visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert await visit.page.evaluate("scroller.scrollWidth") == PHONE["width"]
    assert await visit.page.evaluate(SMALL_TARGETS) == []
    await visit.page.click("#open-chats")
    await visit.page.click(".chat-more")
    assert await visit.page.evaluate(SMALL_TARGETS) == []
    await visit.page.keyboard.press("Escape")
    await visit.page.click("#close-chats")
    await visit.page.click("#open-settings")
    assert await visit.page.evaluate("settings.scrollWidth <= innerWidth")
    assert await visit.page.evaluate(SMALL_TARGETS) == []
    await context.close()
    visit.check_clean()


async def test_it_follows_the_system_and_a_choice_outlives_a_reload(
    visit: Visit, demo_stack: Stack
) -> None:
    page = visit.page
    await page.emulate_media(color_scheme="dark")
    await visit.open(demo_stack.url)
    dark = await page.evaluate(BACKGROUND)
    await page.emulate_media(color_scheme="light")
    light = await page.evaluate(BACKGROUND)
    assert light != dark
    await page.click("#theme")
    await page.click("#theme")
    assert await page.get_attribute("#theme", "aria-label") == "Theme: dark"
    assert await page.evaluate(BACKGROUND) == dark
    await visit.open(demo_stack.url)
    assert await page.evaluate(BACKGROUND) == dark


async def test_without_motion_nothing_moves(visit: Visit, scripted: ScriptedServer) -> None:
    await visit.page.emulate_media(reduced_motion="reduce")
    await visit.open(scripted.url)
    await visit.ask("Hi")
    stream = await scripted.asked()
    await stream.delta(content="Hello")
    await visit.wait_for_text("Hello")
    assert await visit.page.evaluate("document.getAnimations().length") == 0
    await stream.finish()
    await visit.wait_until_done()
