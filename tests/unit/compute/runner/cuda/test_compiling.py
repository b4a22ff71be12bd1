"""Kernels are compiled by forks of this process, loaded by itself, and those that graphs launch."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.cache import get_cache_manager

from services.compute.kernels.kv.kv_format import LayerFormat
from services.compute.kernels.step.span import FULL
from services.compute.kernels.step.step_buffers import page_stride
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.runner.cuda import compiling, forked
from services.compute.runner.cuda.compiling import Kernels
from services.compute.runner.cuda.forked import fork_for
from services.compute.runner.cuda.load import REHEARSED_PAGES


def always() -> bool:
    return True


def test_jobs_are_done_by_other_processes(tmp_path: Path) -> None:
    def note_process(number: int) -> None:
        (tmp_path / str(number)).write_text(str(os.getpid()))

    jobs = [partial(note_process, number) for number in range(20)]
    with fork_for(jobs, 3, always) as done:
        assert sorted(done) == list(range(20))
    pids = {int(file.read_text()) for file in tmp_path.iterdir()}
    assert os.getpid() not in pids and len(pids) <= 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_job_that_fails_or_kills_its_process_or_hangs_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked, "HUNG_AFTER_S", 1.5)
    jobs: list[Callable[[], object]] = [
        lambda: 1 // 0,
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        lambda: time.sleep(60.0),
        lambda: None,
    ]
    with fork_for(jobs, 3, always) as done:
        assert list(done) == [3]


class Store:
    """Kernels as Triton compiles them, and what it has ready for launches."""

    def __init__(self) -> None:
        self.ready: dict[str, Any] = {}

    def compiled(self, key: str) -> Any:
        if key == "wrong":
            raise ValueError("no kernel")
        folder = Path(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "__grp__kernel.json"
        if not file.exists():
            file.write_text(str(os.getpid()))
        return SimpleNamespace(pid=int(file.read_text()), run="", src="", metadata="")

    def launch(self, kernels: Kernels, key: str) -> None:
        if key not in self.ready:
            keep = partial(self.ready.__setitem__, key)
            kernels.submit(key, partial(self.compiled, key), keep)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Without a device."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    active = SimpleNamespace(launcher_cls=lambda src, metadata: None)
    monkeypatch.setattr(compiling, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return Kernels(torch.device("cuda"))


def test_what_is_not_on_disk_is_compiled_elsewhere_and_loaded_here(kernels: Kernels) -> None:
    store = Store()
    store.compiled("old")
    noted = [
        kernels.note(partial(store.launch, kernels, key)) for key in ("old", "new", "old", "wrong")
    ]
    assert [len(each) for each in noted] == [1, 1, 0, 1]
    assert len(kernels.missing) == 2
    done: list[None] = []
    kernels.load(done=lambda: done.append(None))
    assert len(done) == 3
    assert store.ready["old"].pid == os.getpid() != store.ready["new"].pid
    assert store.ready["wrong"] is None  # so that its launch compiles it again, and raises
    assert all(each.is_begun for some in noted for each in some)


def test_when_the_time_is_over_only_what_is_on_disk_is_loaded(kernels: Kernels) -> None:
    store = Store()
    store.compiled("old")
    old, new = (kernels.note(partial(store.launch, kernels, key)) for key in ("old", "new"))
    kernels.load(may_begin=lambda: False)
    assert store.ready["old"].pid == os.getpid() and store.ready["new"] is None
    assert old[0].is_begun and not new[0].is_begun


def test_pages_of_the_rehearsal_are_as_far_apart_as_those_of_the_cache() -> None:
    form = LayerFormat(2, 16, 8, torch.bfloat16, torch.bfloat16)
    layout = CacheLayout.of([FULL] * 3, {FULL: form.num_bytes})
    rehearsal, cache = (
        PagedCache(layout, {FULL: form}, (num_pages, 0), torch.device("cpu")).layer_pages(1)
        for num_pages in (REHEARSED_PAGES, 9)
    )
    assert page_stride(rehearsal.entries) == page_stride(cache.entries)
