"""A process of the pool: reads a job from standard input, works, writes the outcome, repeats.

It ends when its standard input does, so it cannot outlive the service. SIGALRM, left to the
kernel's default, ends it when a template takes too long.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys

from common.errors import ModelError
from services.tokenizer.confinement import Confinement
from services.tokenizer.encode import PromptEncoder
from services.tokenizer.job import (
    HEADER,
    Broken,
    EncoderSettings,
    Outcome,
    Ready,
    Report,
    pack_report,
    unpack_job,
)


def main() -> int:
    """Serve until the jobs end; the only argument is `EncoderSettings` as JSON."""
    # The service alone decides when this process ends, be it Ctrl-C in their common terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    jobs = sys.stdin.buffer
    reports = _take_stdout()
    try:
        settings = EncoderSettings(**json.loads(sys.argv[1]))
        confinement = Confinement(settings.template_timeout_s, settings.template_memory_mb << 20)
        encoder = PromptEncoder(settings, confinement.limits)
    except ModelError as error:
        _write(reports, Broken(str(error)))
        return 1
    gc.freeze()
    _write(reports, Ready())
    while header := jobs.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        outcome: Outcome = encoder.run(unpack_job(jobs.read(size)))
        _write(reports, outcome)
        if outcome.retiring:
            break
    return 0


def _take_stdout() -> int:
    """Keep the pipe for reports; what a library prints goes to standard error instead."""
    reports = os.dup(1)
    os.dup2(2, 1)
    return reports


def _write(fd: int, report: Report) -> None:
    data = memoryview(pack_report(report))
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    try:
        status = main()
    except (BrokenPipeError, KeyboardInterrupt):
        status = 0  # the service is gone
    # Dropping a large vocabulary object by object takes 0.1 s that nobody needs.
    os._exit(status)
