"""What is uploaded is never written over too early."""

from __future__ import annotations

import torch

from services.compute.runner.cuda.staging import Staging


class Waits:
    """Counts the waits for the device."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def make_staging(num_buffers: int, size: int = 4000) -> tuple[Staging, torch.Tensor, Waits]:
    device_buffer = torch.zeros(size, dtype=torch.int32)
    waits = Waits()
    return Staging(device_buffer, num_buffers, waits), device_buffer, waits


def test_what_is_written_reaches_the_device() -> None:
    staging, device_buffer, _ = make_staging(2)
    for num_ints, value in ((1, 3), (1024, 4), (1025, 5), (4000, 6), (7, 7)):
        staging.buffer()[:num_ints] = value
        staging.upload(num_ints)
        assert (device_buffer[:num_ints] == value).all()


def test_one_step_ahead_with_three_buffers_never_waits() -> None:
    staging, _, waits = make_staging(3)
    in_flight: list[int] = []
    for _ in range(20):
        staging.buffer()
        in_flight.append(staging.upload(1))
        if len(in_flight) > 1:
            staging.done(in_flight.pop(0))
    assert waits.count == 0


def test_a_buffer_whose_copy_may_still_run_is_not_handed_out_without_a_wait() -> None:
    staging, _, waits = make_staging(3)
    for _ in range(3):
        staging.buffer()
        staging.upload(1)
    assert waits.count == 0
    staging.buffer()
    assert waits.count == 1


def test_after_a_wait_every_buffer_is_free() -> None:
    staging, _, waits = make_staging(3)
    for _ in range(3 + 3):
        staging.buffer()
        staging.upload(1)
    assert waits.count == 1


def test_a_buffer_asked_for_again_before_its_upload_is_the_same() -> None:
    staging, _, _ = make_staging(3)
    assert staging.buffer() is staging.buffer()


def test_buffers_in_flight_are_not_shared() -> None:
    staging, _, _ = make_staging(3)
    buffers = []
    for _ in range(3):
        buffers.append(staging.buffer())
        staging.upload(1)
    assert len({id(buffer) for buffer in buffers}) == 3


def test_a_late_word_of_an_old_upload_frees_nothing() -> None:
    staging, _, waits = make_staging(2)
    staging.buffer()
    first = staging.upload(1)
    staging.buffer()
    second = staging.upload(1)
    staging.done(second)
    staging.done(first)
    for _ in range(2):
        staging.buffer()
        staging.upload(1)
    assert waits.count == 0
    staging.buffer()
    assert waits.count == 1
