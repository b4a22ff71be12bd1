"""`slipstream serve FILE.gguf`: the same answers as from the folder that the file was made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from benchmarks.stack import Stack
from common.host import cache_folder
from tests.gguf_files import GgufOptions, write_gguf
from tests.system.conftest import client_of

MESSAGES = [{"role": "user", "content": "One, two, three: 日本 🙂"}]
OPTIONS = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def gguf_client(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a server of three files."""
    folder = tmp_path_factory.mktemp("gguf")
    file = write_gguf(tiny_folder, folder / "tiny-F32.gguf", GgufOptions(shard_tensors=10))
    kept, ours = cache_folder("compiled"), folder / "cache" / "slipstream"  # 7 s to compile again
    for path in (kept, ours):
        path.mkdir(parents=True, exist_ok=True)
    (ours / kept.name).symlink_to(kept)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with Stack(file, *OPTIONS, settings={"compute.num_threads": 1}) as stack:
            with client_of(stack) as client:
                yield client


def test_the_answers_are_those_of_the_folder(gguf_client: OpenAI, client: OpenAI) -> None:
    said = [
        each.chat.completions.create(
            model=name, messages=MESSAGES, temperature=0, max_tokens=24, logprobs=True
        )
        for name, each in (("tiny-F32", gguf_client), ("tiny", client))
    ]
    ours, theirs = (answer.choices[0] for answer in said)
    assert ours.message.content == theirs.message.content
    assert said[0].usage == said[1].usage
    assert [token.token for token in ours.logprobs.content] == [
        token.token for token in theirs.logprobs.content
    ]


def test_an_answer_can_be_held_to_a_grammar(gguf_client: OpenAI) -> None:
    answer = gguf_client.chat.completions.create(
        model="tiny-F32",
        messages=MESSAGES,
        extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}},
    )
    assert answer.choices[0].message.content in ("Paris", "Rome")


def test_it_is_listed_by_the_name_of_the_file(gguf_client: OpenAI) -> None:
    assert [model.id for model in gguf_client.models.list()] == ["tiny-F32"]
