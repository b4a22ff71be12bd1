"""Stages meet at their inboxes, and hear of it when one is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError, FatalError
from common.link.curve import create_keys, load_keys
from services.compute.distributed.stage_link import END, Kind, LinkedStages, StageLink, send
from services.compute.distributed.stages import WAIT_MS
from tests.patience import PATIENCE_S


class Stages:
    """So many in this process, with what each has lost."""

    def __init__(self, folder: Path, count: int) -> None:
        self.inboxes = [f"ipc://{folder}/{number}" for number in range(count)]
        self.lost = [threading.Event() for _ in range(count)]
        self.links = [StageLink(None, event.set) for event in self.lost]
        for link, inbox in zip(self.links, self.inboxes, strict=True):
            link.bind(inbox)
        self.all = [
            LinkedStages(number, count, link, link.connect(self.inboxes[(number + 1) % count]))
            for number, link in enumerate(self.links)
        ]

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Stages]:
    stages = Stages(tmp_path, 3)
    yield stages
    stages.close()


def test_all_stages_hear_of_the_least_of_their_values(three: Stages) -> None:
    with ThreadPoolExecutor(3) as threads:
        for values in ((7, 5, 9), (1, 2, 3), (3, 2, 1)):
            heard = threads.map(lambda stage, value: stage.least(value), three.all, values)
            assert [*heard] == [min(values)] * 3


def received(stage: LinkedStages, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    x_TE = torch.empty(shape, dtype=dtype)
    while not stage.receive(x_TE, WAIT_MS):
        pass
    return x_TE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_arrive_as_they_were_made(three: Stages, dtype: torch.dtype) -> None:
    first, second, _ = three.all
    assert not second.receive(torch.empty(1, 8, dtype=dtype), 0)
    made = [torch.arange(8.0 * count).view(count, 8).to(dtype) for count in (3, 1)]
    for x_TE in made:
        first.send(x_TE)
    for x_TE in made:
        assert torch.equal(received(second, (len(x_TE), 8), dtype), x_TE)


def test_hidden_states_of_another_step_are_fatal(three: Stages) -> None:
    three.all[0].send(torch.zeros(3, 8))
    with pytest.raises(FatalError, match="96 bytes came from another stage"):
        received(three.all[1], (2, 8), torch.float32)


def test_a_stage_that_ends_is_missed_by_the_one_before_it(three: Stages) -> None:
    first, second, _ = three.all
    first.send(torch.zeros(1, 8))
    received(second, (1, 8), torch.float32)
    assert not three.lost[0].wait(0.05)
    three.links.pop(1).close()
    assert three.lost[0].wait(PATIENCE_S)


def test_a_stage_that_cannot_load_says_why(three: Stages) -> None:
    leader = three.links[0].connect(three.inboxes[2])
    send(leader, Kind.CALL, b"1234", 3)
    send(leader, Kind.CALL, number=END)
    assert three.links[2].take(Kind.CALL) == (3, b"1234")
    assert three.links[2].take(Kind.CALL).number == END
    send(leader, Kind.BROKEN, b"the folder is empty")
    with pytest.raises(ConfigError, match="the folder is empty"):
        three.links[2].take(Kind.LEAST)


def test_an_inbox_that_is_taken_or_elsewhere_is_refused(three: Stages) -> None:
    link = StageLink(None, lambda: None)
    with pytest.raises(ConfigError, match=r"pipeline_stages: tcp://192.0.2.1:7100 cannot be bound"):
        link.bind("tcp://192.0.2.1:7100")
    link.close()


def test_only_who_has_keys_is_heard(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        create_keys(tmp_path / name)
    ours, theirs = (load_keys(tmp_path / name, "compute") for name in ("ours", "theirs"))
    inbox = StageLink(ours, lambda: None)
    inbox.bind(f"ipc://{tmp_path}/inbox")
    links = [StageLink(keys, lambda: None) for keys in (None, theirs, ours)]
    for number, link in enumerate(links):
        send(link.connect(f"ipc://{tmp_path}/inbox"), Kind.CALL, number=number)
    assert inbox.take(Kind.CALL).number == 2
    assert inbox.look(Kind.CALL, 50) is None
    for link in (inbox, *links):
        link.close()
