"""The pool with real processes: hostile templates, huge prompts, kills from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import uvloop

from common.child_process import Exited, PipedChild, Received
from common.errors import ModelError
from common.messages.tokenize import (
    ChatPrompt,
    OutputRules,
    PromptSource,
    Structure,
    TextPrompt,
    ToolUse,
)
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import EncoderSettings, Job, Outcome
from services.tokenizer.pool import Pool
from tests.patience import PATIENCE_S
from tests.unit.tokenizer.vocabularies import byte_level, write_folder

LIMITS = {"template_timeout_s": 1.0, "template_memory_mb": 64}
HOSTILE = """
{%- set text = messages[0].content -%}
{%- if text == 'loop' -%}
    {%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif text == 'one long operation' -%}
    {{- (9 ** (99999999 + messages | length)) | string -}}
{%- elif text == 'one large object' -%}
    {{- ('a' * 2000000000) | length -}}
{%- elif text == 'many objects' -%}
    {%- set ns = namespace(all=['x']) -%}
    {%- for a in range(99) -%}{%- set ns.all = ns.all + ns.all -%}{%- endfor -%}
{%- endif -%}
{{- text -}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), byte_level(), chat_template=HOSTILE)


class Workshop:
    """A running pool, with its ticks."""

    def __init__(
        self,
        folder: Path,
        num_processes: int,
        template_timeout_s: float = 1.0,
        max_prompt_bytes: int = 8 << 20,
    ) -> None:
        limits = {**LIMITS, "template_timeout_s": template_timeout_s}
        settings = EncoderSettings(str(folder), max_prompt_bytes, tool_format="hermes", **limits)
        self._settings_json = json.dumps(asdict(settings))
        self.processes: list[PipedChild] = []
        own = TokenizerSettings(pool_size=num_processes, template_timeout_s=template_timeout_s)
        self.pool = Pool(own, self._spawn)

    def _spawn(self, received: Received, exited: Exited) -> PipedChild:
        process = PipedChild("services.tokenizer.worker", [self._settings_json], received, exited)
        self.processes.append(process)
        return process

    async def __aenter__(self) -> Workshop:
        await self.pool.start()
        self._tick()
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._timer.cancel()
        self.pool.stop()
        for process in self.processes:
            with pytest.raises(ProcessLookupError):
                os.kill(process.pid, 0)

    def _tick(self) -> None:
        self.pool.tick()
        self._timer = asyncio.get_running_loop().call_later(0.05, self._tick)

    def submit(
        self, prompt: PromptSource, rules: OutputRules | None = None
    ) -> asyncio.Future[Outcome]:
        future = asyncio.get_running_loop().create_future()
        job = Job(prompt, 0.0, rules=rules or OutputRules())
        self.pool.submit(job, future.set_result)
        return future

    def chat(self, text: str) -> asyncio.Future[Outcome]:
        return self.submit(ChatPrompt(json.dumps([{"role": "user", "content": text}]).encode()))


Scenario = Callable[[Workshop], Awaitable[None]]


@pytest.fixture
def play(folder: Path) -> Callable[..., None]:
    """Runs a scenario in a loop of its own, as services have it."""

    def played(scenario: Scenario, num_processes: int = 2, template_timeout_s: float = 1.0) -> None:
        async def whole() -> None:
            async with Workshop(folder, num_processes, template_timeout_s) as workshop:
                await scenario(workshop)

        uvloop.run(whole())

    return played


@pytest.mark.parametrize("deed", ["loop", "one long operation"])
def test_a_template_without_end_is_killed_and_the_service_goes_on(
    deed: str, play: Callable[..., None]
) -> None:
    async def scenario(workshop: Workshop) -> None:
        bad, good = workshop.chat(deed), workshop.chat("hello")
        failure = (await bad).failure
        assert failure is not None
        assert (failure.status, failure.code) == (400, "template_error")
        assert "1 s" in failure.message
        assert (await good).ids
        assert (await workshop.chat("after")).ids

    play(scenario, num_processes=1)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux only")
@pytest.mark.parametrize("deed", ["one large object", "many objects"])
def test_a_template_that_allocates_without_end_is_stopped_and_the_service_goes_on(
    deed: str, play: Callable[..., None]
) -> None:
    async def scenario(workshop: Workshop) -> None:
        failure = (await workshop.chat(deed)).failure
        assert failure is not None and failure.status == 400
        assert "64 MiB" in failure.message
        assert (await workshop.chat("after")).ids

    play(scenario, num_processes=1, template_timeout_s=PATIENCE_S)


def test_the_loop_stays_free_while_a_huge_prompt_is_encoded(play: Callable[..., None]) -> None:
    async def scenario(workshop: Workshop) -> None:
        loop = asyncio.get_running_loop()
        huge = workshop.submit(TextPrompt("What is the capital of France? " * 70_000))
        num_turns = 0

        def turn() -> None:
            nonlocal num_turns
            num_turns += 1
            if not huge.done():
                loop.call_soon(turn)

        turn()
        for number in range(20):
            assert (await workshop.submit(TextPrompt(f"small {number}"))).ids
        assert not huge.done(), "small prompts pass the huge one"
        assert len((await huge).ids) > 500_000
        assert num_turns > 1000

    play(scenario)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_killed_or_stopped_from_outside_costs_no_request(
    play: Callable[..., None], fault: signal.Signals
) -> None:
    async def scenario(workshop: Workshop) -> None:
        huge = workshop.submit(TextPrompt("word " * 100_000))
        os.kill(workshop.processes[0].pid, fault)
        assert len((await huge).ids) > 100_000
        assert workshop.pool.num_restarts == 1

    play(scenario, num_processes=1)


@pytest.mark.parametrize(
    "deed", ["nested options, then a long line", "a long line", "deep brackets"]
)
def test_a_grammar_that_explodes_is_refused_and_the_service_goes_on(
    deed: str, play: Callable[..., None]
) -> None:
    sources = {
        "nested options, then a long line": "root ::= "
        + "(" * 400
        + '"a"'
        + "?)" * 400
        + '"b" ' * 900_000,
        "a long line": "root ::= " + '"a" ' * 300_000,
        "deep brackets": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000,
    }
    rules = OutputRules(structure=Structure("grammar", sources[deed], "structured_outputs"))

    async def scenario(workshop: Workshop) -> None:
        bad = workshop.submit(TextPrompt("x"), rules)
        good = workshop.submit(TextPrompt("hello"))
        failure = (await bad).failure
        assert failure is not None and failure.status == 400, failure
        assert (await good).ids
        assert (await workshop.submit(TextPrompt("hello"))).failure is None

    play(scenario)


def test_an_answers_rules_are_composed_within_the_limits(play: Callable[..., None]) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages = json.dumps([{"role": "user", "content": "hello"}]).encode()
    prompt = ChatPrompt(messages, json.dumps([tool]).encode())
    structures = (Structure("regex", "[a-z]+", "regex"), Structure("grammar", "a ::= [a-z]", "g"))

    async def scenario(workshop: Workshop) -> None:
        called = await workshop.submit(prompt, OutputRules(tools=ToolUse("required")))
        grammar_spec = called.answer.grammar_spec
        assert grammar_spec is not None and '\\"look\\"' in grammar_spec.grammar
        assert called.answer.tool_format == "hermes"
        for structure in structures:
            rules = OutputRules(structure=structure, bad_words=("dog",))
            shaped = await workshop.submit(TextPrompt("x"), rules)
            grammar_spec = shaped.answer.grammar_spec
            assert grammar_spec is not None and "[a-z]" in grammar_spec.grammar
            assert grammar_spec.banned_sequences

    play(scenario, num_processes=1)


def test_many_prompts_come_back_as_what_they_were(play: Callable[..., None]) -> None:
    async def scenario(workshop: Workshop) -> None:
        reference = byte_level()
        texts = [f"prompt {number} " * (1 + number % 50) for number in range(300)]
        outcomes = await asyncio.gather(*[workshop.submit(TextPrompt(text)) for text in texts])
        for text, outcome in zip(texts, outcomes, strict=True):
            assert outcome.ids.tolist() == reference.encode(text).ids

    play(scenario)


def test_a_folder_that_cannot_be_loaded_is_told_at_the_start(tmp_path: Path) -> None:
    async def start() -> None:
        async with Workshop(tmp_path, 2):
            pass

    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        asyncio.run(start())


def test_a_template_that_does_not_compile_in_time_is_told_at_the_start(tmp_path: Path) -> None:
    async def start() -> None:
        async with Workshop(tmp_path, 1):
            pass

    write_folder(tmp_path, byte_level(), chat_template="{{ (9 ** 99999999) | string }}")
    with pytest.raises(ModelError, match="to compile"):
        asyncio.run(start())


def test_a_process_ends_with_its_service(folder: Path) -> None:
    settings = json.dumps(asdict(EncoderSettings(str(folder), 1000, **LIMITS)))
    command = [sys.executable, "-m", "services.tokenizer.worker", settings]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert done.stdout[4:] == b"\x91\xa5ready" and not done.stderr
