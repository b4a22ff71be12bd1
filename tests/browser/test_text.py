"""Text as it is drawn: tables, links, colours of code, formulas; whole, and while it comes."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import Visit

FOLDER = Path(__file__).parents[1] / "unit" / "web" / "samples"
SAMPLES = {path.stem: path.read_text() for path in sorted(FOLDER.iterdir())}

STREAMED_AND_WHOLE = """
async (text) => {
  const { MarkdownView } = await import("/page/markdown/view.mjs");
  const whole = document.createElement("div");
  new MarkdownView(whole).update(text, false);
  const streamed = document.createElement("div");
  const view = new MarkdownView(streamed);
  for (let end = 1; end <= text.length; end += 1) view.update(text.slice(0, end), true);
  view.update(text, false);
  for (const host of [streamed, whole]) host.normalize();
  return streamed.isEqualNode(whole) ? "" : `${streamed.innerHTML} ${whole.innerHTML}`;
}
"""
ADDRESSES = """[...document.querySelectorAll("#log a")].map((link) =>
  [link.getAttribute("href"), link.rel, link.target])"""


async def show(visit: Visit, scripted: ScriptedServer, text: str) -> None:
    """Let the model say that text."""
    await visit.open(scripted.url)
    await visit.ask("Say it")
    stream = await scripted.asked()
    await stream.delta(content=text)
    await stream.finish()
    await visit.wait_until_done()


def texts_of_marks(count: int) -> list[str]:
    """Texts of Markdown's marks in an order that makes no sense, the same in every run."""
    random = Random(5)
    pieces = [piece for text in SAMPLES.values() for piece in re.findall(r"\w+|\W{1,3}", text)]
    return ["".join(random.choices(pieces, k=random.randint(1, 30))) for _ in range(count)]


async def test_marks_in_any_order_look_alike_however_they_came(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    for text in texts_of_marks(150):
        assert await visit.page.evaluate(STREAMED_AND_WHOLE, text) == "", text


@pytest.mark.parametrize("text", SAMPLES.values(), ids=SAMPLES.keys())
async def test_a_text_looks_alike_however_it_came(
    visit: Visit, scripted: ScriptedServer, text: str
) -> None:
    await visit.open(scripted.url)
    assert await visit.page.evaluate(STREAMED_AND_WHOLE, text) == ""


async def test_a_table_has_heads_cells_and_sides(visit: Visit, scripted: ScriptedServer) -> None:
    await show(visit, scripted, "| a | b |\n|---|--:|\n| **1** | `x|y` |\n| 2 |\n\nend")
    table = visit.answer().locator("table")
    assert await table.locator("th").all_inner_texts() == ["a", "b", ""]
    assert await table.locator("tbody tr").count() == 2
    assert await table.locator("td strong").inner_text() == "1"
    side = "getComputedStyle(document.querySelectorAll('td')[1]).textAlign"
    assert await visit.page.evaluate(side) == "end"


async def test_a_table_that_grows_keeps_its_rows_and_never_shows_its_marks(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("A table")
    stream = await scripted.asked()
    await stream.delta(content="| Name | Age |")
    await visit.answer().locator("th", has_text="Age").wait_for()
    await visit.page.evaluate("window.kept = document.querySelector('.content table')")
    for piece in ("\n", "|--", "-|---|\n", "| Ann |", " 1 |\n| B", "ob"):
        await stream.delta(content=piece)
    await visit.answer().locator("td", has_text="Bob").wait_for()
    await stream.delta(content=" | 2 |\n\nThat is **al")
    await visit.answer().locator("strong", has_text="al").wait_for()
    assert "*" not in await visit.answer().locator(".content").inner_text()
    await stream.delta(content="l**.")
    await stream.finish()
    await visit.wait_until_done()
    assert await visit.answer().locator("table td").count() == 4
    assert await visit.page.evaluate("window.kept === document.querySelector('.content table')")


async def test_links_lead_only_where_it_is_safe(visit: Visit, scripted: ScriptedServer) -> None:
    await show(visit, scripted, SAMPLES["links"])
    found = await visit.page.evaluate(ADDRESSES)
    assert [address for address, _, _ in found] == [
        "https://docs.example/a_(b)?q=1#top",
        "https://example.com/x",
        "https://example.com/path_with_underscores/and*stars",
        "http://example.com/in_brackets",
        "https://exam/",
        "https://example.com/picture.png",
    ]
    assert {(rel, target) for _, rel, target in found} == {("noopener noreferrer", "_blank")}
    assert await visit.page.locator("#log img").count() == 0
    assert "[a script](javascript:alert(1))" in await visit.answer().inner_text()


async def test_code_has_colours_and_is_copied_as_it_is(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.ask("Code")
    stream = await scripted.asked()
    code = 'def f(x):\n    """Two\n    lines."""\n    return x + 1  # more\n'
    await stream.delta(content="```python\n")
    for at in range(0, len(code), 3):
        await stream.delta(content=code[at : at + 3])
    await visit.answer().locator(".code-comment", has_text="# more").wait_for()
    await stream.delta(content="```")
    await stream.finish()
    await visit.wait_until_done()
    shown = visit.answer().locator("pre code")
    assert await shown.evaluate("(code) => code.textContent") == code.rstrip("\n")
    assert await shown.locator(".code-keyword").all_inner_texts() == ["def", "return"]
    assert await shown.locator(".code-string").all_inner_texts() == ['"""Two', '    lines."""']


async def test_formulas_are_drawn_by_the_browser(visit: Visit, scripted: ScriptedServer) -> None:
    await show(visit, scripted, "So $\\frac{a}{b}$ is\n\n$$\\sum_{i=1}^n \\alpha_i \\oops$$")
    inline, block = visit.answer().locator("math").first, visit.answer().locator("math").nth(1)
    assert await inline.get_attribute("display") == "inline"
    assert await inline.locator("mfrac > mi").all_text_contents() == ["a", "b"]
    assert await block.locator("munderover").count() == 1
    assert await block.locator("mtext").text_content() == "\\oops"
    assert await block.get_attribute("alttext") == "\\sum_{i=1}^n \\alpha_i \\oops"
    boxes = [await part.bounding_box() for part in await inline.locator("mi").all()]
    assert boxes[0] is not None and boxes[1] is not None
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]  # one is above the other


async def test_questions_are_drawn_as_answers_are(visit: Visit, scripted: ScriptedServer) -> None:
    await visit.open(scripted.url)
    await visit.ask("What does **this** do?\n  indented\n\n```js\nconst x = 1;\n```")
    bubble = visit.page.locator(".bubble")
    assert "do?\n  indented" in await bubble.inner_text()
    assert await bubble.locator("strong").inner_text() == "this"
    assert await bubble.locator(".code-keyword").inner_text() == "const"
    stream = await scripted.asked()
    assert "**this**" in stream.body["messages"][0]["content"]
    await stream.finish()
    await visit.wait_until_done()


async def test_marks_are_not_read_out(visit: Visit, scripted: ScriptedServer) -> None:
    text = "# So\n\n- **bold** and [a link](https://example.com)\n\n| a | b |\n|---|---|\n"
    await show(visit, scripted, text)
    said = await visit.page.locator("#announcer").inner_text()
    assert said.split() == "Answering. So bold and a link a b Answer complete.".split()
