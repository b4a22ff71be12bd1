"""The generator is Philox4x32-10 as published: the vectors are those of the Random123 package."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.sampling.philox import philox4x32

KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, 2**32 - 1)


def words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([value]) for value in counter)
    k0, k1 = (torch.tensor([value]) for value in key)
    return tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert words(counter, key) == expected


@settings(deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_every_product_keeps_its_64_bits(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    assert words(counter, key) == (c0, c1, c2, c3)


def test_words_broadcast() -> None:
    block = torch.arange(5)[None, :]
    index, key = torch.arange(3)[:, None], torch.tensor([[9], [8], [7]])
    zero = torch.zeros(3, 1, dtype=torch.int64)
    table = philox4x32((block, index, zero, zero), (key, zero))
    for row in range(3):
        for column in range(5):
            assert words((column, row, 0, 0), (9 - row, 0)) == tuple(
                int(lane[row, column]) for lane in table
            )
