"""`make pictures`: take the pictures of the chat page that the documentation shows.

They are taken by the system's Chromium, of a server of the demo model where the picture has
figures in it, else of the scripted server of the page's tests. An idle machine shows the figures
that a user would see.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from playwright.async_api import Browser, ViewportSize, async_playwright

from benchmarks.stack import Stack
from tests.browser.conftest import ARGUMENTS, CHROMIUMS, DEMO
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import PHONE, Visit

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
NORMAL: ViewportSize = {"width": 1000, "height": 800}
WIDE: ViewportSize = {"width": 1200, "height": 720}

TEXT = r"""Quicksort's time depends on how well the pivots split the array:

| Case | Time | When |
|:-----|:----:|------|
| best | $O(n \log n)$ | each pivot is the median |
| worst | $O(n^2)$ | the array is **sorted** already |

With random pivots the expected number of comparisons is

$$
C_n = (n - 1) + \frac{2}{n} \sum_{k=0}^{n-1} C_k \approx 2n \ln n
$$

```python
def quicksort(values: list[int]) -> list[int]:
    if len(values) < 2:  # nothing to sort
        return values
    pivot, *rest = values
    return quicksort([v for v in rest if v < pivot]) + [pivot] + ...
```

See [the original paper](https://doi.org/10.1093/comjnl/5.1.10) for more.
"""
QUESTION = "How fast is *quicksort*? Please show `O(n)` for each case."
SCRIPT = {"name": "sort.py", "mimeType": "text/x-python", "buffer": b"def sort(values):\n" * 60}


async def page_text(visit: Visit, scripted: ScriptedServer) -> None:
    """A question and an answer with everything that Markdown has."""
    await visit.talk(scripted, QUESTION, TEXT)
    await visit.page.evaluate("scroller.scrollTop = 60")


async def page_chats(visit: Visit, scripted: ScriptedServer) -> None:
    """The list of conversations, an edited question with a file, and a stopped answer."""
    for question in ("How do whales sleep?", "Names for a grey cat", QUESTION):
        await visit.talk(scripted, question, "Let me think about that.")
        await visit.page.click("#new-chat")
    await visit.talk(scripted, "What does this file do?", "Which file?")
    await visit.page.click("[data-action='edit']")
    await visit.page.set_input_files("#file-picker", [SCRIPT])  # type: ignore[list-item]
    await visit.page.locator("#files .chip").wait_for()
    await visit.ask("What does this file do, and is there a faster way?")
    stream = await scripted.asked()
    await stream.delta(content="It sorts a list of values. A faster way is the built-in `sorted`")
    await visit.wait_for_text("sorted")
    await visit.page.keyboard.press("Escape")
    await visit.wait_until_done()
    await visit.page.locator(".chat-more").nth(1).click()


async def page_phone(visit: Visit, scripted: ScriptedServer) -> None:
    """The same on a phone."""
    await page_text(visit, scripted)


async def page_stages(visit: Visit) -> None:
    """An answer of the demo model with its stages."""
    await visit.ask("What is the capital of France?")  # the first one after a start is slower
    await visit.wait_until_done()
    await visit.page.click("#new-chat")
    await visit.ask("What is 17 plus 25?")
    await visit.wait_until_done()
    await visit.answer().locator(".stages summary").click()
    await visit.answer().locator(".lane").first.wait_for()


async def page_tokens(visit: Visit) -> None:
    """A token of the demo model's with its alternatives."""
    await visit.settings(logprobs=True, temperature=0.9, seed=4)
    await visit.ask("Tell me a story.")
    await visit.wait_until_done()
    await visit.page.evaluate("scroller.scrollTop = 0")
    await visit.answer().locator(".token[data-level='4']").first.hover()


async def page_tools(visit: Visit) -> None:
    """Two calls of the demo model's at once, thought of before."""
    await visit.settings(temperature=0, reasoning="on", get_weather=True)
    await visit.ask("What is the weather in Paris and in Rome?")
    await visit.wait_until_done()
    await visit.answer(0).locator(".reasoning summary").click()


OF_SCRIPT: dict[Callable[[Visit, ScriptedServer], Awaitable[None]], tuple[str, ViewportSize]] = {
    page_text: ("light", NORMAL),
    page_chats: ("light", WIDE),
    page_phone: ("dark", PHONE),
}
OF_DEMO: dict[Callable[[Visit], Awaitable[None]], tuple[str, ViewportSize]] = {
    page_stages: ("light", {"width": 1000, "height": 900}),
    page_tokens: ("dark", {"width": 1000, "height": 620}),
    page_tools: ("light", {"width": 1000, "height": 880}),
}


async def visit_of(browser: Browser, url: str, scheme: str, size: ViewportSize) -> Visit:
    """Open the page as somebody who likes that scheme."""
    context = await browser.new_context(
        viewport=size,
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    visit = await Visit.begin(context)
    await visit.open(url)
    return visit


async def save(visit: Visit, name: str) -> None:
    """Take the picture, without what blinks."""
    path = IMAGES / f"{name.replace('_', '-')}.png"
    await visit.page.screenshot(path=path, caret="hide")
    await visit.page.context.close()
    print(f"{path.name}: {path.stat().st_size // 1024} KB")


async def take(names: list[str]) -> None:
    """Take the pictures of those names."""
    executable = next(filter(None, map(shutil.which, CHROMIUMS)))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        for scripted_picture, (scheme, size) in OF_SCRIPT.items():
            if scripted_picture.__name__ in names:
                server = ScriptedServer()
                server.card = {"id": "demo"}
                await server.start()
                visit = await visit_of(browser, server.url, scheme, size)
                await scripted_picture(visit, server)
                await save(visit, scripted_picture.__name__)
                await server.stop()
        for demo_picture, (scheme, size) in OF_DEMO.items():
            if demo_picture.__name__ in names:
                with Stack(DEMO, "--device", "cpu", "--dtype", "float32") as stack:
                    visit = await visit_of(browser, stack.url, scheme, size)
                    await demo_picture(visit)
                    await save(visit, demo_picture.__name__)
        await browser.close()


def main() -> None:
    """Take the pictures that are named, or all."""
    every = [picture.__name__ for picture in (*OF_SCRIPT, *OF_DEMO)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}")
    asyncio.run(take(parser.parse_args().names or every))


if __name__ == "__main__":
    main()
