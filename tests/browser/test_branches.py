"""Questions that are edited, answers that are made again, and answers that go on."""

from __future__ import annotations

from benchmarks.stack import Stack
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import Visit


async def test_any_question_can_be_edited_and_the_old_branch_is_kept(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    page = visit.page
    for text in ("One", "Two"):
        await visit.talk(scripted, text, f"To {text}")
    await page.locator("[data-action='edit']").first.click()
    assert await page.input_value("#question") == "One"
    assert await page.locator("#editing").is_visible()
    await page.keyboard.press("Escape")
    assert await page.input_value("#question") == ""
    await page.locator("[data-action='edit']").first.click()
    await visit.ask("One, edited")
    stream = await scripted.asked()
    assert stream.body["messages"] == [{"role": "user", "content": "One, edited"}]
    await stream.delta(content="To the edited")
    await stream.finish()
    await visit.wait_until_done()
    assert await page.locator(".bubble").all_inner_texts() == ["One, edited"]
    assert "2 of 2" in await page.locator(".versions").inner_text()
    await page.get_by_label("Previous version of this question").click()
    assert await page.locator(".bubble").all_inner_texts() == ["One", "Two"]
    await visit.wait_for_text("To Two")
    focused = await page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == "Next version of this question"
    await visit.open(scripted.url)  # the branch that was shown comes back, and the other one, too
    assert await page.locator(".bubble").all_inner_texts() == ["One", "Two"]
    await page.get_by_label("Next version of this question").click()
    await visit.wait_for_text("To the edited")


async def test_an_answer_made_again_is_another_version(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.talk(scripted, "Question", "First answer")
    await visit.page.click("text=Regenerate")
    stream = await scripted.asked()
    await stream.delta(content="Second answer")
    await stream.finish()
    await visit.wait_until_done()
    assert await visit.page.locator(".answer").count() == 1
    await visit.page.get_by_label("Previous version of this answer").click()
    await visit.wait_for_text("First answer")
    await visit.ask("More?")
    stream = await scripted.asked()
    asked = [message["content"] for message in stream.body["messages"]]
    assert asked == ["Question", "First answer", "More?"]
    await stream.finish()
    await visit.wait_until_done()


async def test_a_stopped_answer_goes_on_where_it_stopped(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("Count")
    stream = await scripted.asked()
    await stream.delta(content="**One** two ")
    await visit.wait_for_text("One two")
    await visit.page.keyboard.press("Escape")
    await visit.wait_until_done()
    await visit.page.click("text=Continue")
    stream = await scripted.asked()
    assert stream.body["messages"][-1] == {"role": "assistant", "content": "**One** two"}
    assert stream.body["continue_final_message"] is True
    assert stream.body["add_generation_prompt"] is False
    await stream.delta(content=" three")
    await stream.finish()
    await visit.wait_until_done()
    assert await visit.answer().locator(".content").inner_text() == "One two three"
    assert await visit.page.locator(".answer").count() == 1
    assert await visit.page.locator("text=Continue >> visible=true").count() == 0
    await visit.ask("Next")
    stream = await scripted.asked()
    assert "continue_final_message" not in stream.body
    assert stream.body["messages"][1]["content"] == "**One** two three"
    await stream.finish()
    await visit.wait_until_done()


async def test_a_continuation_that_is_refused_leaves_what_was_there(
    visit: Visit, scripted: ScriptedServer
) -> None:
    visit.expected_network_errors = 1
    await visit.open(scripted.url)
    await visit.ask("Count")
    stream = await scripted.asked()
    await stream.delta(content="One")
    await stream.finish("length")
    await visit.wait_until_done()
    scripted.refuse(400, {"message": "the template cannot do that"})
    await visit.page.click("text=Continue")
    await visit.answer().locator(".problem", has_text="cannot do that").wait_for()
    await visit.wait_for_text("One")


async def test_a_real_answer_that_was_cut_goes_on(visit: Visit, demo_stack: Stack) -> None:
    await visit.open(demo_stack.url)
    await visit.settings(temperature=0)
    await visit.ask("What is the capital of France?")
    await visit.wait_until_done()
    whole = await visit.answer().locator(".content").inner_text()
    await visit.page.click("#new-chat")
    await visit.settings(max_tokens=3)
    await visit.ask("What is the capital of France?")
    await visit.wait_until_done()
    assert await visit.answer().locator(".content").inner_text() != whole
    await visit.settings(max_tokens="")
    await visit.page.click("text=Continue")
    await visit.wait_until_done()
    assert await visit.answer().locator(".content").inner_text() == whole
