"""One visit to the page: what a user does there, and what must never happen meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from playwright.async_api import (
        BrowserContext,
        ConsoleMessage,
        Locator,
        Page,
        Request,
        Route,
        ViewportSize,
    )

    from tests.browser.scripted_server import ScriptedServer

TIMEOUT_MS = 1000 * PATIENCE_S
PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1100, "height": 800}
KEY = "let-me-in"

# Chromium logs every answer with a 4xx or 5xx, and every connection that breaks, as an error.
NETWORK_ERROR = re.compile(r"^Failed to load resource: ")

WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => console.error(
  "policy violated: " + event.violatedDirective + " " + event.blockedURI));
"""


async def _answer_nothing(route: Route) -> None:
    await route.fulfill(content_type="text/html")


async def new_tab(context: BrowserContext) -> Page:
    """Open a tab that complains where the page breaks its policy."""
    page = await context.new_page()
    await page.add_init_script(WATCH_POLICY)
    return page


class Visit:
    """A page with a log of all that it asked for and complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.network_errors: list[str] = []
        self.requested: list[str] = []
        self.expected_network_errors = 0
        self.provoked: re.Pattern[str] | None = None  # complaints that the test is after
        self.origin = ""
        self._opened: set[str] = set()
        self._listeners: dict[Any, Callable[[Any], None]] = {
            "console": self._said,
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": self._asked,
        }
        page.set_default_timeout(TIMEOUT_MS)
        for event, listener in self._listeners.items():
            page.on(event, listener)

    @classmethod
    async def begin(cls, context: BrowserContext) -> Visit:
        """Open an empty tab."""
        return cls(await new_tab(context))

    async def end(self) -> None:
        """Leave the tab to the next visitor, who finds nothing of this one."""
        page = self.page
        for event, listener in self._listeners.items():
            page.remove_listener(event, listener)
        for other in page.context.pages:
            if other is not page:
                await other.close()
        await page.route("**", _answer_nothing)  # for the server, which may be gone
        for url in self._opened:
            await page.goto(url)
            await page.evaluate("localStorage.clear(); sessionStorage.clear()")
        await page.unroute("**")
        await page.emulate_media(color_scheme="null", reduced_motion="null")
        await page.set_viewport_size(DESK)
        await page.mouse.move(0, 0)

    async def open(self, url: str, ready: bool = True) -> None:
        """Go to the page of a server and wait until it knows the models."""
        self.origin = url
        self._opened.add(url)
        await self.page.goto(url + "/")
        if ready:
            await self.page.wait_for_selector("#model:not([disabled])")

    async def ask(self, text: str) -> None:
        """Type a question and send it by Enter."""
        await self.page.fill("#question", text)
        await self.page.press("#question", "Enter")

    async def talk(self, scripted: ScriptedServer, question: str, answer: str) -> None:
        """Ask, and let the scripted model answer that."""
        await self.ask(question)
        stream = await scripted.asked()
        await stream.delta(content=answer)
        await stream.finish()
        await self.wait_until_done()

    def answer(self, index: int = -1) -> Locator:
        """Find an answer, the last one if not said otherwise."""
        return self.page.locator(".answer").nth(index)

    async def wait_for_text(self, text: str) -> None:
        """Wait until the last answer's text has that in it."""
        await self.answer().locator(".content", has_text=text).wait_for()

    async def wait_until_done(self) -> None:
        """Wait until nothing streams any more."""
        await self.page.wait_for_selector("#send:not([hidden])")
        await self.page.wait_for_selector(".answer:last-child[aria-busy='false']")

    async def settings(self, **values: Any) -> None:
        """Fill in the settings."""
        await self.page.click("#open-settings")
        for name, value in values.items():
            field = self.page.locator(f"#settings-form [name='{name}']")
            if isinstance(value, bool):
                await field.set_checked(value)
            elif name == "reasoning":
                await field.select_option(value)
            else:
                await field.fill(str(value))
        await self.page.click("#close-settings")

    async def unlock(self) -> None:
        """Type the key that the page asks for."""
        await self.page.fill("#key-value", KEY)
        await self.page.press("#key-value", "Enter")

    def check_clean(self) -> None:
        """Fail where the page complained, or asked anybody but its own server."""
        wanted = self.provoked
        provoked = [each for each in self.complaints if wanted and wanted.search(each)]
        assert self.complaints == provoked, self.complaints
        assert bool(provoked) == (wanted is not None)
        assert len(self.network_errors) == self.expected_network_errors, self.network_errors
        strangers = [url for url in self.requested if _origin(url) not in (self.origin, "data:")]
        assert strangers == [], strangers
        assert self.requested, "nothing was watched"

    def _said(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if NETWORK_ERROR.match(message.text):
            self.network_errors.append(f"{message.text} {message.location}")
        else:
            self.complaints.append(message.text)

    def _asked(self, request: Request) -> None:
        self.requested.append(request.url)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return "data:" if parts.scheme == "data" else f"{parts.scheme}://{parts.netloc}"
