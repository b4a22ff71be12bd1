"""The thread that drives a device has a core that no other thread of the server may run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.stack import Stack, descendants_of
from services.launcher.plan import cpus_in


def allowed_cpus(pid: int) -> dict[int, set[int]]:
    """Return where each thread of a process may run."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                found[int(task.name)] = cpus_in(line.partition(":")[2].strip())
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 4, reason="needs four processors")
def test_only_the_thread_that_drives_the_device_runs_on_its_core(sim_folder: Path) -> None:
    with Stack(sim_folder, "--device", "sim", "--pin", "on") as stack:
        (said,) = stack.logged("pinned")
        core = said["core"]
        compute = stack.pids()["compute-0"]
        threads = allowed_cpus(compute)
        assert threads.pop(compute) == {core}  # the first thread has the process's id
        assert threads  # ZeroMQ's own
        for pid in (stack.process.pid, *descendants_of(stack.process.pid)):
            if pid != compute:
                threads |= allowed_cpus(pid)
        assert all(core not in cpus for cpus in threads.values())
        assert all(cpus for cpus in threads.values())


def test_nothing_is_pinned_where_there_is_no_gpu(sim_stack: Stack) -> None:
    assert sim_stack.logged("pinned") == []
    everywhere = os.sched_getaffinity(0)
    for pid in sim_stack.pids().values():
        assert all(cpus == everywhere for cpus in allowed_cpus(pid).values())
