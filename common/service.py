"""The `main` of every service: settings, logs, traces, links, then the life of its actor."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from common.config import ServiceConfig, Settings, load
from common.errors import EXIT_CONFIG, EXIT_FATAL, ConfigError, InboxTaken, ModelError
from common.lifecycle import Actor, Watch, run_service
from common.link.transport import Transport
from common.run_dir import private_run_dir
from common.telemetry import log, trace

S = TypeVar("S", bound=Settings)


def service_main(
    service: str,
    settings_type: type[S],
    inbox: Any,
    make: Callable[[ServiceConfig[S]], Actor],
) -> int:
    """Run one service in this process until it is told to end; returns the exit status.

    `service` names the table of `settings_type`, `inbox` is the union of the messages that the
    actor takes. If `make` or the actor's `start` raises `ConfigError` or `ModelError`, the status
    is 78, and a launcher does not try again. The setting `grace_s` bounds the drain.
    """
    arguments = _arguments(service)
    try:
        config = load(settings_type, service, arguments.config, os.environ, arguments.name)
        log.configure(config.name, service, config.telemetry)
        with _run_dir(config) as config, _traces(config):
            return _run(config, inbox, make(config))
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"slipstream {service}: {error}\n")
        return EXIT_CONFIG
    except InboxTaken as error:
        sys.stderr.write(f"slipstream {service}: {error}\n")
        return EXIT_FATAL


def _run(config: ServiceConfig[S], inbox: Any, actor: Actor) -> int:
    # ZeroMQ is loaded after the settings are read: a mistake in them is reported at once.
    from common.link.sockets import ZmqTransport

    def bind() -> Transport:
        transport = ZmqTransport.bind(config.links, config.name, inbox)
        log.describe_process(instance_id=transport.address.instance_id)
        return transport

    watch = Watch(
        run_dir=config.links.run_dir,
        grace_s=float(getattr(config.own, "grace_s", 30.0)),
        launcher_fd=config.launcher_fd,
        on_tick=trace.flush,
    )
    return run_service(config.name, actor, bind, watch)


@contextlib.contextmanager
def _run_dir(config: ServiceConfig[S]) -> Iterator[ServiceConfig[S]]:
    with private_run_dir(config.links.run_dir) as run_dir:
        links = config.links.model_copy(update={"run_dir": run_dir})
        yield replace(config, links=links)


@contextlib.contextmanager
def _traces(config: ServiceConfig[S]) -> Iterator[None]:
    trace.configure(config.name, config.service, config.telemetry)
    try:
        yield
    finally:
        trace.shutdown()


def _arguments(service: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service}",
        description=f"Run the {service} service alone. `slipstream serve` runs all four.",
        epilog="Every setting can also come from the environment: SLIPSTREAM_TABLE__FIELD.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings, as TOML (default: $SLIPSTREAM_CONFIG)"
    )
    parser.add_argument(
        "--name",
        default=service,
        help="name of this instance, unique in its run_dir (default: %(default)s)",
    )
    return parser.parse_args()
