"""Text files that go with a question, and the values that the settings show."""

from __future__ import annotations

from benchmarks.stack import Stack
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import Visit

NOTES = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"# Notes\n\n```\nx\n```\n"}
PICTURE = {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff\x00"}
LARGE = {"name": "c.txt", "mimeType": "text/plain", "buffer": b"x" * 300_000}

DROP = """() => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File(["dropped"], "d.txt"));
  const init = { bubbles: true, cancelable: true, dataTransfer };
  document.body.dispatchEvent(new DragEvent("drop", init));
}"""


async def test_a_text_file_goes_with_the_question_in_a_fence(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    page = visit.page
    await page.set_input_files("#file-picker", [NOTES])  # type: ignore[list-item]
    assert await page.locator("#files .chip").inner_text() == "notes.md\n19 B\n✕"
    await visit.ask("What is this?")
    assert await page.locator("#files .chip").count() == 0
    stream = await scripted.asked()
    fenced = "notes.md:\n\n````md\n# Notes\n\n```\nx\n```\n````\n\nWhat is this?"
    assert stream.body["messages"][0]["content"] == fenced
    await stream.finish()
    await visit.wait_until_done()
    chip = page.locator(".question .file")
    await chip.locator("summary").click()
    assert "# Notes" in await chip.locator("pre").inner_text()
    assert await page.locator(".bubble").inner_text() == "What is this?"
    await page.locator("[data-action='edit']").click()  # it comes back with its question
    assert await page.locator("#files .chip").count() == 1
    await page.get_by_label("Remove notes.md").click()
    assert await page.locator("#files .chip").count() == 0


async def test_what_is_no_text_or_too_large_is_refused_with_a_reason(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    page = visit.page
    await page.set_input_files("#file-picker", [PICTURE, LARGE, NOTES])  # type: ignore[list-item]
    trouble = page.locator("#file-trouble", has_text="b.png is not a text file")
    assert "c.txt has 293 KB; files of 256 KB at most" in await trouble.inner_text()
    assert await page.locator("#files .chip-name").all_inner_texts() == ["notes.md"]
    many = [{**NOTES, "name": f"{number}.md"} for number in range(12)]
    await page.set_input_files("#file-picker", many)  # type: ignore[arg-type]
    await page.locator("#file-trouble", has_text="10 files at most").wait_for()
    assert await page.locator("#files .chip").count() == 10


async def test_files_can_be_dropped(visit: Visit, scripted: ScriptedServer) -> None:
    await visit.open(scripted.url)
    await visit.page.evaluate(DROP)
    await visit.page.locator("#files .chip-name", has_text="d.txt").wait_for()
    await visit.page.press("#question", "Enter")
    stream = await scripted.asked()
    assert stream.body["messages"][0]["content"] == "d.txt:\n\n```txt\ndropped\n```"
    await stream.finish()
    await visit.wait_until_done()


async def test_empty_settings_show_the_values_in_force(visit: Visit, demo_stack: Stack) -> None:
    await visit.open(demo_stack.url)
    await visit.page.click("#open-settings")
    shown = await visit.page.evaluate(
        """Object.fromEntries([...document.querySelectorAll("#settings-form [data-default]")]
             .map((field) => [field.name, field.placeholder]))"""
    )
    assert shown == {
        "temperature": "1",
        "max_tokens": "up to 2,048",
        "top_p": "1",
        "top_k": "0",
        "min_p": "0",
        "seed": "random",
        "frequency_penalty": "0",
        "presence_penalty": "0",
        "repetition_penalty": "1",
    }


async def test_a_models_own_values_are_shown(visit: Visit, scripted: ScriptedServer) -> None:
    scripted.card = {"sampling_defaults": {"temperature": 0.6, "top_k": 20}}
    await visit.open(scripted.url)
    await visit.page.click("#open-settings")
    assert await visit.page.get_attribute("[name='temperature']", "placeholder") == "0.6"
    assert await visit.page.get_attribute("[name='top_k']", "placeholder") == "20"
