"""Servers and models that the system tests share; each is made once.

Servers end with the last test of this folder, not with the session: an idle one takes 2 % of a core
for its heartbeats, and other tests go on for minutes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.ring import wait_empty

TOOL_TEMPLATE = (  # calls as Hermes models write them
    "<|bos|>{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "Call <tool_call>{...}</tool_call><|end|>{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped model of 150,000 random weights; its name is `tiny`."""
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", ModelShape())


@pytest.fixture(scope="session")
def sim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, for the virtual device; its name is `sim`."""
    folder = tmp_path_factory.mktemp("models") / "sim"
    return save_folder(folder, ModelShape(max_model_len=8192), with_weights=False)


@pytest.fixture(scope="package")
def tiny_stack(tiny_folder: Path) -> Iterator[Stack]:
    """A server that computes the tiny model in float32."""
    options = ("--device", "cpu", "--dtype", "float32")
    # One thread: several that wait for each other take seconds where the machine is busy.
    settings = {"router.max_body_bytes": 1 << 18, "compute.num_threads": 1}
    with Stack(tiny_folder, *options, settings=settings) as stack:
        yield stack


@pytest.fixture(scope="package")
def sim_stack(sim_folder: Path) -> Iterator[Stack]:
    """A server whose virtual device takes 2 ms a step."""
    settings = {"compute.sim_step_base_s": 0.002}
    with Stack(sim_folder, "--device", "sim", settings=settings) as stack:
        yield stack


@pytest.fixture(scope="package")
def _mortal_stacks(sim_folder: Path) -> Iterator[Callable[[], Stack]]:
    """Servers one after another: the last one as long as it runs, then another."""
    stacks: list[Stack] = []

    def running() -> Stack:
        if stacks and stacks[-1].process.poll() is not None:
            stacks.pop().close()
        if not stacks:
            settings = {"compute.sim_step_base_s": 0.02}
            stacks.append(Stack(sim_folder, "--device", "sim", settings=settings).wait_ready())
        return stacks[-1]

    yield running
    for stack in stacks:
        stack.close()


@pytest.fixture
def mortal_stack(_mortal_stacks: Callable[[], Stack]) -> Stack:
    """A server whose steps take 20 ms, idle, for a test that may end it or kill what it likes.

    The next test gets it as it is left, if it still runs: what is in its log may be another's.
    """
    stack = _mortal_stacks()
    wait_empty(stack)
    return stack


@pytest.fixture(scope="package")
def demo_stack() -> Iterator[Stack]:
    """A server of the demo model, as `slipstream serve` starts it."""
    settings = {"compute.num_threads": 1}
    with Stack(DEMO, "--device", "cpu", "--dtype", "float32", settings=settings) as stack:
        yield stack


@pytest.fixture(scope="session")
def strict_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the virtual device whose template knows tools; its name is `strict`."""
    folder = tmp_path_factory.mktemp("models") / "strict"
    save_folder(folder, ModelShape(max_model_len=8192), with_weights=False)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.fixture(scope="package")
def strict_stack(strict_folder: Path) -> Iterator[Stack]:
    """A server whose limits are small enough to be met."""
    settings = {
        "compute.sim_step_base_s": 0.002,
        "compute.grammar_timeout_s": 2.0,
        "compute.grammar_step_timeout_s": 3.0,
        "router.max_body_bytes": 1 << 18,
        "router.body_timeout_s": 1.5,
        "router.slow_client_buffer_bytes": 1 << 14,
        "router.slow_client_max_bytes": 1 << 16,
        "router.slow_client_timeout_s": 2.0,
    }
    with Stack(strict_folder, "--device", "sim", settings=settings) as stack:
        yield stack


@pytest.fixture
def client(tiny_stack: Stack) -> Iterator[OpenAI]:
    """A client of the tiny model."""
    with client_of(tiny_stack) as found:
        yield found


@pytest.fixture
async def async_client(tiny_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """The same on a loop."""
    async with async_client_of(tiny_stack) as found:
        yield found


def client_of(stack: Stack, api_key: str = "none") -> OpenAI:
    """A client that tries once."""
    return OpenAI(base_url=f"{stack.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S)


def async_client_of(stack: Stack) -> AsyncOpenAI:
    """The same on a loop."""
    return AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    )
