"""Text of models and servers stays text, and the page asks nobody but its own server."""

from __future__ import annotations

import re

from benchmarks.stack import Stack
from services.router.chat_page import CONTENT_SECURITY_POLICY
from tests.browser.scripted_server import ScriptedServer
from tests.browser.visit import Visit

NASTY = (
    "<script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">"
    "<a href='javascript:document.title=1'>x</a>"
    "[link](javascript:alert(1)) ![image](http://elsewhere.example/x.png) &lt;b&gt;"
)
SHOWN = NASTY.replace("![image](http://elsewhere.example/x.png)", "🖼 image")
ELSEWHERE = "http://elsewhere.example/x.png"  # it may be linked, never loaded
MARKUP = f"#log script, #log img, #log a:not([href='{ELSEWHERE}']), #log iframe, #log svg image"


async def test_markup_in_answers_is_shown_and_not_run(
    visit: Visit, scripted: ScriptedServer
) -> None:
    await visit.open(scripted.url)
    await visit.settings(calculator=True)
    await visit.ask(NASTY)
    stream = await scripted.asked()
    function = {"name": NASTY, "arguments": NASTY}
    await stream.delta(reasoning=NASTY)
    await stream.delta(content=f"{NASTY}\n\n- {NASTY}\n\n> {NASTY}\n\n```{NASTY}\n{NASTY}\n```\n")
    await stream.delta(tool_calls=[{"index": 0, "id": NASTY, "function": function}])
    await stream.finish("tool_calls")
    after = await scripted.asked()
    await after.finish()
    await visit.wait_until_done()
    assert SHOWN in await visit.page.locator(".bubble").inner_text()
    assert await visit.page.locator(MARKUP).count() == 0
    assert await visit.page.title() == "Slipstream"


async def test_markup_in_errors_is_shown_and_not_run(
    visit: Visit, scripted: ScriptedServer
) -> None:
    visit.expected_network_errors = 1
    scripted.refuse(400, {"message": NASTY, "param": NASTY, "code": NASTY})
    await visit.open(scripted.url)
    await visit.ask("Hi")
    problem = visit.answer().locator(".problem")
    await problem.wait_for()
    assert NASTY in await problem.inner_text()
    assert await visit.page.locator(MARKUP).count() == 0
    await visit.open(scripted.url)  # and kept text is text
    assert NASTY in await visit.answer().locator(".problem").inner_text()
    assert await visit.page.title() == "Slipstream"


async def test_the_policy_is_sent_and_holds(visit: Visit, demo_stack: Stack) -> None:
    await visit.open(demo_stack.url)
    response = await visit.page.request.get(demo_stack.url + "/")
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    head = await visit.page.request.head(demo_stack.url + "/page/app.mjs")
    assert head.headers["content-type"] == "text/javascript; charset=utf-8"
    assert int(head.headers["content-length"]) > 1000 and await head.body() == b""
    refused = await visit.page.evaluate(
        """() => { try { document.body.innerHTML = "<b>x</b>"; return false; }
                  catch { return true; } }"""
    )
    assert refused
    visit.provoked = re.compile("TrustedHTML|require-trusted-types-for")
