"""Two models behind one router: the second is one more compute, which comes and goes."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.stack import ROOT, Stack, command_line
from tests.patience import PATIENCE_S
from tests.system.conftest import SimStack
from tests.system.ring import wait_empty

SETTINGS = """
[model]
path = "{model}"
[links]
run_dir = "{run_dir}"
routers = ["ipc://{run_dir}/router-0.sock"]
[compute]
device = "sim"
grammar_at_startup = false
"""


def test_a_second_model_shares_the_tokenizers_sleeps_and_is_woken(
    sim_folder: Path, tmp_path: Path
) -> None:
    large = shutil.copytree(sim_folder, tmp_path / "large")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    with SimStack(sim_folder, settings={"router.wake_s": 120}) as stack:
        with _compute(stack, large, tmp_path):
            assert _ask(stack, "sim") == (200, "sim")
            assert _ask(stack, "large") == (200, "large")
            assert _ask(stack, "other") == (404, "")
            assert _statuses(stack) == {"sim": "loaded", "large": "loaded"}
        stack.wait_until(
            lambda: _statuses(stack) == {"sim": "loaded", "large": "asleep"}, PATIENCE_S, "asleep"
        )
        with ThreadPoolExecutor() as threads:
            held = threads.submit(_ask, stack, "large")
            assert _ask(stack, "sim") == (200, "sim")
            assert not held.done()
            with _compute(stack, large, tmp_path):
                assert held.result() == (200, "large")
                wait_empty(stack)
        assert len(stack.logged("worker loads")) >= 2


@contextmanager
def _compute(stack: Stack, model: Path, scratch: Path) -> Iterator[None]:
    """Run a compute of another model beside those of a launch, until the router has it."""
    router = command_line(stack.pids()["router-0"])
    run_dir = Path(router[router.index("--config") + 1]).parent
    settings = scratch / "settings.toml"
    settings.write_text(SETTINGS.format(model=model, run_dir=run_dir))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "services.compute", "--config", str(settings)]
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--name", "second"], stderr=log, env=environment)
    try:
        stack.wait_until(lambda: _statuses(stack).get(model.name) == "loaded", PATIENCE_S, "loaded")
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


def _statuses(stack: Stack) -> dict[str, str]:
    return {card["id"]: card["status"] for card in stack.get("/v1/models")["data"]}


def _ask(stack: Stack, model: str) -> tuple[int, str]:
    """Return an answer's status, and the model that it names."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    try:
        body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 4})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()).get("model", "")
    finally:
        connection.close()
