"""The page's files as they are served: types, headers, tags."""

from __future__ import annotations

import posixpath
import re

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from services.router.chat_page import CONTENT_TYPES, STATIC, PageHandler

PAGE = PageHandler()


async def get(path: str, **headers: str) -> web.Response:
    """Ask the handler for a file."""
    given = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return await PAGE.file(make_mocked_request("GET", path, headers=given))


async def test_the_root_is_the_page() -> None:
    response = await get("/")
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert isinstance(response.body, bytes) and b"<title>Slipstream</title>" in response.body


@pytest.mark.parametrize("path", sorted(PAGE.paths))
async def test_every_file_has_a_type_a_tag_and_the_policy(path: str) -> None:
    response = await get(path)
    assert response.headers["Content-Type"] in CONTENT_TYPES.values()
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    again = await get(path, If_None_Match=response.headers["ETag"])
    assert (again.status, again.body) == (304, None)
    assert again.headers["ETag"] == response.headers["ETag"]


async def test_another_tag_gets_the_file() -> None:
    assert (await get("/", If_None_Match='"other"')).status == 200
    assert (await get("/", If_None_Match="*")).status == 304


def test_every_file_of_the_folder_is_served_and_nothing_else() -> None:
    files = (path for path in STATIC.rglob("*") if path.is_file())
    names = {path.relative_to(STATIC).as_posix() for path in files} - {"index.html"}
    assert PAGE.paths == {"/", "/favicon.ico"} | {f"/page/{name}" for name in names}


async def test_a_tab_that_shows_an_answer_of_the_api_has_the_pages_icon() -> None:
    response, icon = await get("/favicon.ico"), await get("/page/mark.svg")
    assert response.body == icon.body
    assert response.headers["Content-Type"] == "image/svg+xml; charset=utf-8"


async def test_whatever_the_page_refers_to_is_there() -> None:
    for path in PAGE.paths:
        body = (await get(path)).body
        assert isinstance(body, bytes)
        text = body.decode()
        found = re.findall(r'(?:src|href)="(/[^"]*)"', text)
        imported = re.findall(r'from "(\.[^"]+)"', text)
        found += [
            posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in imported
        ]
        assert set(found) <= PAGE.paths, path
