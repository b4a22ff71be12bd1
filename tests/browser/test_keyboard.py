"""Everything by keyboard alone, and what a screen reader is told."""

from __future__ import annotations

from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import Visit

FOCUSED = "document.activeElement.id || document.activeElement.textContent.trim()"


async def test_a_conversation_needs_no_pointer(visit: Visit, scripted: ScriptedServer) -> None:
    keyboard = visit.page.keyboard
    await visit.open(scripted.url)
    assert await visit.page.evaluate(FOCUSED) == "question"
    await keyboard.type("first line")
    await keyboard.press("Shift+Enter")
    await keyboard.type("second line")
    await keyboard.press("Enter")
    stream = await scripted.asked()
    assert stream.body["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
    await stream.delta(content="To be continued")
    await visit.wait_for_text("To be continued")
    await keyboard.press("Escape")
    await visit.wait_until_done()
    assert await visit.answer().locator(".note").inner_text() == "Stopped."
    for _ in range(2):  # over the button that attaches files
        await keyboard.press("Shift+Tab")
    assert await visit.page.evaluate(FOCUSED) == "Regenerate"
    await keyboard.press("Enter")
    stream = await scripted.asked()
    await stream.delta(content="Again. ")
    await stream.finish()
    await visit.wait_until_done()
    assert await visit.page.evaluate(FOCUSED) == "question"
    said = await visit.page.locator("#announcer").inner_text()
    assert (
        said.split()
        == "Answering. To be continued Stopped. Answering. Again. Answer complete.".split()
    )


async def test_settings_open_and_close_by_keyboard(visit: Visit, scripted: ScriptedServer) -> None:
    page, keyboard = visit.page, visit.page.keyboard
    await visit.open(scripted.url)
    await page.focus("#open-settings")
    await keyboard.press("Enter")
    assert await page.evaluate("settings.contains(document.activeElement)")
    await page.focus("[name='temperature']")
    await keyboard.type("0.5")
    await keyboard.press("Escape")
    assert await page.evaluate(FOCUSED) == "open-settings"
    await visit.settings(
        system="Be brief.", seed=7, top_k=3, stop="END\nFIN", max_tokens=9, min_p=0.1
    )
    await visit.ask("Hi")
    stream = await scripted.asked()
    sent = {name: stream.body.get(name) for name in ("temperature", "seed", "top_k", "min_p")}
    assert sent == {"temperature": 0.5, "seed": 7, "top_k": 3, "min_p": 0.1}
    assert (stream.body["stop"], stream.body["max_tokens"]) == (["END", "FIN"], 9)
    assert stream.body["messages"][0] == {"role": "system", "content": "Be brief."}
    unset = {"top_p", "tools", "logprobs", "presence_penalty", "reasoning_effort"}
    assert not unset & set(stream.body)
    await stream.finish()
    await visit.wait_until_done()


async def test_the_first_tab_stop_skips_to_the_question(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.page.evaluate("document.activeElement.blur()")
    await visit.page.focus(".skip")
    assert (
        await visit.page.evaluate("document.querySelector('.skip').getBoundingClientRect().top")
        >= 0
    )
    await visit.page.keyboard.press("Enter")
    assert await visit.page.evaluate(FOCUSED) == "question"


async def test_every_control_has_a_name(visit: Visit, scripted: ScriptedServer) -> None:
    await visit.open(scripted.url)
    await visit.page.click("#open-settings")
    unnamed = await visit.page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea")]
           .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim()
                               || each.labels?.[0]?.textContent.trim()))
           .map((each) => each.outerHTML)"""
    )
    assert unnamed == []
