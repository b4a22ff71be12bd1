"""The process of a stage: it loads the layers that the one that leads says, and makes its calls."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
import structlog

from common.config import LinkSettings
from common.errors import EXIT_CONFIG, EXIT_FATAL, ConfigError, ModelError
from common.telemetry import log
from common.telemetry.line_writer import STDERR, LineWriter
from services.compute.distributed.stage_link import END, Kind, StageLink, send
from services.compute.runner.executor import Executor
from services.compute.runner.frames import Frame, RepeatedCalls
from services.compute.runner.group import limits_of
from services.compute.runner.registry import load_stage
from services.compute.runner.stage_group import StageStart
from services.compute.runner.stage_place import keys_for, literal

LAST_LINES_S = 1.0
LAST_CALL_S = 0.1


def wait_at(inbox: str, folder: str, links: LinkSettings) -> int:
    """Be a stage of whoever writes to this inbox, until that ends; returns the status. The model is
    in the leader's folder, or in this one."""
    try:
        link = StageLink(keys_for(inbox, links), end_with_others)
        link.bind(literal(inbox))
    except ConfigError as error:
        sys.stderr.write(f"slipstream stage: {error}\n")
        return EXIT_CONFIG
    if not inbox.startswith("ipc:"):
        sys.stderr.write(f"slipstream stage: waits at {inbox} for the process that leads\n")
    return run(link, folder, links)


def run(link: StageLink, folder: str, links: LinkSettings) -> int:
    """Load a part of the model, and make the calls of who leads until that ends."""
    start = StageStart.model_validate_json(bytes(link.take(Kind.START).payload))
    stderr = LineWriter(STDERR, log.warn_of_dropped)
    identity = log.Identity(start.process, start.telemetry)
    identity.take(stderr, stage=str(start.number))
    leader = link.connect(literal(start.inboxes[-1]))
    try:
        place = start.place(links)
        about = start.settings, place.linked(link), place
        executor = load_stage(Path(folder) if folder else start.folder, *about)
        limits = np.array(limits_of(executor.spec()), dtype=np.int64)
        send(leader, Kind.READY, limits, start.number)
        follow(executor, link)
        return 0
    except (ConfigError, ModelError) as error:
        send(leader, Kind.BROKEN, str(error).encode())
        link.take(Kind.CALL)  # the last one: who leads may have to load until it hears of this
        return EXIT_CONFIG
    except Exception as error:
        structlog.get_logger().critical("stage failed", exc_info=error)
        stderr.close(LAST_LINES_S)
        return EXIT_FATAL


def follow(executor: Executor, link: StageLink) -> None:
    """Make the calls that come until the last."""
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would hold up all stages
    calls = RepeatedCalls(executor)
    while (message := link.take(Kind.CALL)).number != END:
        ints = np.frombuffer(message.payload, dtype=np.int32)
        own = calls.room(message.number, len(ints))
        own[:] = ints
        calls.repeat(Frame(message.number, own))


def end_with_others() -> None:
    """A connection is lost: unless it is the end of all, which comes at the same time."""
    time.sleep(LAST_CALL_S)
    structlog.get_logger().critical("another stage is lost, and this one ends, too")
    time.sleep(LAST_CALL_S)
    os._exit(EXIT_FATAL)
