"""Stages start together and end together."""

from __future__ import annotations

import os
import queue
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stack import is_running
from common.config import LinkSettings
from common.errors import EXIT_FATAL, ConfigError, FatalError
from common.host import children_of
from services.compute.config import ComputeSettings
from services.compute.distributed.stage_link import END, Kind, StageLink, send
from services.compute.runner.group import limits_of
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.pipeline import PipelineExecutor
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.registry import load_runner, load_stage
from services.compute.runner.stage_group import StageGroup, StageStart
from services.compute.runner.stage_place import inbox_of, keys_for
from tests.free_ports import free_addresses
from tests.patience import PATIENCE_S
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed.served import GREEDY, PROMPTS, SETTINGS
from tests.unit.compute.engine_server import Server
from tests.unit.compute.tiny_models import make_model, save_model

SPEC = RunnerSpec(
    vocab_size=0, max_model_len=0, eos_token_ids=(), kv_groups=(), num_pages=0, num_host_pages=0,
    max_num_seqs=5, max_step_tokens=0, stall_after_s=5.0, num_stages=2,
)  # fmt: skip
DRAFTS = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'
ALONE = SETTINGS.model_copy(update={"speculative_config": "off"})
LOOPBACK = LinkSettings.model_validate({"insecure": True})


def two_stages(**more: object) -> ComputeSettings:
    return SETTINGS.model_copy(update={"pipeline_parallel_size": 2, **more})


def answers_of_few_words(runner: PackingRunner, settings: ComputeSettings) -> Server:
    server = Server(runner, settings)
    few_words = replace(GREEDY, max_tokens=12, logit_bias=((5, 40.0), (9, 40.0)))
    for counter, prompt in enumerate(PROMPTS):
        server.ask(counter, prompt, GREEDY)
        server.ask(10 + counter, prompt, replace(few_words, temperature=0.8 * counter))
    server.run()
    return server


def test_stages_of_two_ranks_are_one_model_until_a_process_dies(tmp_path: Path) -> None:
    """What they draft changes nothing. Stages of one rank are in distributed/test_gloo.py, too."""
    folder = save_model(make_model("qwen3"), tmp_path)
    settings = two_stages(tensor_parallel_size=2, speculative_config=DRAFTS)
    ends: queue.Queue[int] = queue.Queue()
    group = StageGroup(folder, settings, LOOPBACK, ends.put)
    executor = load_stage(folder, settings, group.stages, group.place)
    group.wait_until_ready(executor.spec())
    runner = PackingRunner(PipelineExecutor(executor, group))
    staged = answers_of_few_words(runner, settings)
    assert staged.tokens == answers_of_few_words(load_on_cpu(folder, ALONE), ALONE).tokens
    assert staged.scheduler.stats().accepted_drafts_total > 0
    assert ends.empty()
    (child,) = group._children
    (rank,) = children_of(child.pid)
    os.kill(rank, signal.SIGKILL)
    assert ends.get(timeout=PATIENCE_S) == EXIT_FATAL
    runner.close()
    assert not is_running(child.pid) and not is_running(rank)


def test_ranks_of_a_stage_wait_beside_its_first_one() -> None:
    assert [inbox_of("ipc:///tmp/x/0", rank) for rank in range(2)] == [
        "ipc:///tmp/x/0",
        "ipc:///tmp/x/0-1",
    ]
    assert inbox_of("tcp://[::1]:7100", 3) == "tcp://[::1]:7103"


class Elsewhere:
    """A stage that was started by somebody else, which does as it is told here."""

    def __init__(self) -> None:
        self.inboxes = tuple(f"tcp://{host}:{port}" for host, port in free_addresses(2))
        self.settings = two_stages(pipeline_stages=self.inboxes)
        self.lost = threading.Event()
        self.link = StageLink(None, self.lost.set)
        self.link.bind(self.inboxes[0])
        self.group = StageGroup(Path("/m"), self.settings, LOOPBACK, lambda status: None)
        self.start = StageStart.model_validate_json(bytes(self.link.take(Kind.START).payload))
        self.leader = self.link.connect(self.start.inboxes[-1])

    def close(self) -> None:
        self.group.close()
        assert self.link.take(Kind.CALL).number == END
        assert self.lost.wait(PATIENCE_S)
        self.link.close()


def test_a_stage_elsewhere_is_told_what_to_load_and_makes_the_calls() -> None:
    stage = Elsewhere()
    start = stage.start
    assert (start.number, start.inboxes, start.folder) == (0, stage.inboxes, Path("/m"))
    assert start.settings == stage.settings
    limits = np.array(limits_of(SPEC), dtype=np.int64)
    send(stage.leader, Kind.READY, limits)
    stage.group.wait_until_ready(SPEC)
    stage.group.send(2, np.arange(5, dtype=np.int32))
    number, payload = stage.link.take(Kind.CALL)
    assert (number, np.frombuffer(payload, np.int32).tolist()) == (2, [0, 1, 2, 3, 4])
    stage.close()


def test_a_stage_that_has_loaded_something_else_is_told() -> None:
    stage = Elsewhere()
    send(stage.leader, Kind.READY, np.array([9] * 6, dtype=np.int64), 0)
    with pytest.raises(FatalError, match="stage 0 has loaded a model of other limits"):
        stage.group.wait_until_ready(SPEC)
    stage.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline_stages": ("tcp://127.0.0.1:1",)}, "has 1 addresses, and .* is 2"),
        ({"pipeline_stages": ("gpu-host:7100", "tcp://127.0.0.1:1")}, "gpu-host:7100 is not tcp:"),
        ({"pipeline_stages": ("tcp://127.0.0.1:1", "tcp://192.0.2.1:7100")}, "so it needs keys"),
    ],
)
def test_inboxes_that_cannot_work_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StageGroup(Path("/m"), two_stages(**changes), LOOPBACK)


def test_children_meet_where_nobody_else_can_enter() -> None:
    assert keys_for("ipc:///tmp/x/0", LOOPBACK) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefill_context_parallel_size": 2}, "leave compute.pipeline_parallel_size out"),
        ({"speculative_config": '{"model": "m"}'}, "say num_speculative_tokens"),
    ],
)
def test_what_stages_cannot_be_had_with_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_runner(Path("/m"), two_stages(**changes))
