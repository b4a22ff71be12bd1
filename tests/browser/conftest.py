"""A real Chromium on the chat page, in front of a real server or of a scripted one.

All of it runs on one loop of the session: the browser is started once, and a scripted server can
wait for what the page shows. Browser and servers end with the last test of this folder.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.stack import Stack
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import DESK, KEY, Visit, new_tab

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests of this folder on the session's loop; leave a page before its server ends."""
    for item in items:
        if not item.nodeid.startswith("tests/browser/"):
            continue
        item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        names = getattr(item, "fixturenames", [])
        if "scripted" in names and "visit" in names:  # what is set up first ends last
            names.remove("scripted")
            names.insert(names.index("visit"), "scripted")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where the system's own Chromium is; nothing is downloaded."""
    pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUMS)} is installed")
    return found


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    """Chromium without a window."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def tab(browser: Browser) -> AsyncIterator[Page]:
    """One for all visits in turn, as another takes Chromium a second of a core."""
    context = await browser.new_context(viewport=DESK)
    yield await new_tab(context)
    await context.close()


@pytest_asyncio.fixture(loop_scope="session")
async def visit(tab: Page) -> AsyncIterator[Visit]:
    """A visitor whom nothing was kept of; at the end the page must have been clean all along."""
    visit = Visit(tab)
    yield visit
    await visit.end()
    visit.check_clean()


@pytest.fixture(scope="package")
def demo_stack(chromium: str) -> Iterator[Stack]:
    """A server of the demo model."""
    options = ("--device", "cpu", "--dtype", "float32")
    with Stack(DEMO, *options, settings={"compute.num_threads": 1}) as stack:
        yield stack


@pytest.fixture(scope="package")
def locked_stack(chromium: str, endless_folder: Path) -> Iterator[Stack]:
    """A server that wants a key; its virtual device makes a hundred tokens a second."""
    settings = {"router.api_keys": KEY, "compute.sim_step_base_s": 0.01}
    with Stack(endless_folder, "--device", "sim", settings=settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, which goes on for as long as it may; its name is `sim`."""
    folder = tmp_path_factory.mktemp("models") / "sim"
    return save_folder(folder, ModelShape(max_model_len=8192), with_weights=False)


@pytest_asyncio.fixture(loop_scope="session")
async def scripted() -> AsyncIterator[ScriptedServer]:
    """The page's own files, and answers that the test writes event by event."""
    server = ScriptedServer()
    await server.start()
    yield server
    await server.stop()
