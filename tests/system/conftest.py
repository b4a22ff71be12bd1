"""Servers and models that the system tests share; each is made once.

A server lives while file after file in this process wants it: an idle one takes 2 % of a core for
its heartbeats, and other tests go on for minutes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
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


class SimStack(Stack):
    """One on the virtual device, with what no test of it wants left out: 0.5 s of a core.

    That is a second process for texts, and one for masks before a request wants it.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        settings: Mapping[str, object] | None = None,
        log_fd: int | None = None,
    ) -> None:
        less = {"tokenizer.pool_size": 1, "compute.grammar_at_startup": False}
        options = ("--device", "sim", *options)
        super().__init__(folder, *options, settings={**less, **(settings or {})}, log_fd=log_fd)


_RUNNING: dict[str, Stack] = {}  # by the fixture's name


def shared(fixture: str, make: Callable[[], Stack]) -> Stack:
    """Return the server of a fixture, which is made if none runs."""
    if fixture in _RUNNING and _RUNNING[fixture].process.poll() is not None:
        _RUNNING.pop(fixture).close()
    if fixture not in _RUNNING:
        _RUNNING[fixture] = make().wait_ready()
    return _RUNNING[fixture]


def end_all(but: Collection[str] = ()) -> None:
    """End the servers of all fixtures but some."""
    for fixture in _RUNNING.keys() - but:
        _RUNNING.pop(fixture).close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, end what the next file has no use for."""
    if nextitem is None:
        end_all()
    elif nextitem.path != item.path:
        following = (each for each in item.session.items if each.path == nextitem.path)
        end_all(but={name for each in following for name in getattr(each, "fixturenames", ())})


def pytest_sessionfinish() -> None:
    """End what is left where a failure stopped the tests."""
    end_all()


@pytest.fixture(scope="module")
def tiny_stack(tiny_folder: Path) -> Stack:
    """A server that computes the tiny model in float32."""
    options = ("--device", "cpu", "--dtype", "float32")
    # One thread: several that wait for each other take seconds where the machine is busy.
    settings = {
        "router.max_body_bytes": 1 << 18,
        "compute.num_threads": 1,
        # As many drafts as there are, whatever a busy machine's steps take.
        "compute.speculative_config": '{"num_speculative_tokens": 4}',
    }
    return shared("tiny_stack", lambda: Stack(tiny_folder, *options, settings=settings))


@pytest.fixture(scope="module")
def sim_stack(sim_folder: Path) -> Stack:
    """A server whose virtual device takes 2 ms a step."""
    settings = {"compute.sim_step_base_s": 0.002}
    return shared("sim_stack", lambda: SimStack(sim_folder, settings=settings))


@pytest.fixture
def mortal_stack(sim_folder: Path) -> Stack:
    """A server whose steps take 20 ms, idle, for a test that may end it or kill what it likes.

    The next test gets it as it is left, if it still runs: what is in its log may be another's.
    """
    settings = {"compute.sim_step_base_s": 0.02}
    stack = shared("mortal_stack", lambda: SimStack(sim_folder, settings=settings))
    wait_empty(stack)
    return stack


@pytest.fixture(scope="module")
def demo_stack() -> Stack:
    """A server of the demo model, as `slipstream serve` starts it."""
    options = ("--device", "cpu", "--dtype", "float32")
    settings = {"compute.num_threads": 1}
    return shared("demo_stack", lambda: Stack(DEMO, *options, settings=settings))


@pytest.fixture(scope="session")
def strict_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the virtual device whose template knows tools; its name is `strict`."""
    folder = tmp_path_factory.mktemp("models") / "strict"
    save_folder(folder, ModelShape(max_model_len=8192), with_weights=False)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def strict_stack(strict_folder: Path) -> Stack:
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
    return shared(
        "strict_stack", lambda: Stack(strict_folder, "--device", "sim", settings=settings)
    )


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
