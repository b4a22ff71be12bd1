"""Fills rows of equal length with whole conversations, in parallel and reproducibly."""

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.demo.training.conversation import Conversation
from models.demo.training.tokenizer import PAD, encode

CONVERSATIONS_PER_CHUNK = 500


@dataclass(frozen=True)
class Rows:
    """Packed rows of R by T: tokens, which of them to learn, and the conversation of each."""

    ids_RT: npt.NDArray[np.int16]
    learned_RT: npt.NDArray[np.bool_]
    segment_RT: npt.NDArray[np.int16]

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.ids_RT)


def pack(encoded: Iterator[tuple[list[int], list[bool]]], num_rows: int, row_length: int) -> Rows:
    """Fill rows in order; a conversation too long for the rest of its row starts the next."""
    ids_RT = np.full((num_rows, row_length), PAD, np.int16)
    learned_RT = np.zeros((num_rows, row_length), np.bool_)
    segment_RT = np.zeros((num_rows, row_length), np.int16)
    row, used, segment = 0, 0, 0
    for ids, learned in encoded:
        length = min(len(ids), row_length)
        if used + length > row_length:
            row, used, segment = row + 1, 0, 0
            if row == num_rows:
                break
        segment += 1
        ids_RT[row, used : used + length] = ids[:length]
        learned_RT[row, used : used + length] = learned[:length]
        segment_RT[row, used : used + length] = segment
        used += length
    return Rows(ids_RT, learned_RT, segment_RT)


def pack_shard(
    tokenizer_json: str,
    source: Callable[[int], Iterator[Conversation]],
    num_rows: int,
    row_length: int,
    seed: int,
) -> Rows:
    """Fill the rows of one shard from its own seed."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    stream = source(seed)

    def encoded() -> Iterator[tuple[list[int], list[bool]]]:
        while True:
            yield from encode(tokenizer, list(islice(stream, CONVERSATIONS_PER_CHUNK)))

    return pack(encoded(), num_rows, row_length)


def pack_shards(
    tokenizer: Tokenizer,
    source: Callable[[int], Iterator[Conversation]],
    rows_per_shard: int,
    row_length: int,
    seeds: range,
) -> Rows:
    """Pack one shard per seed on all processors; their number does not change the result."""
    work = partial(pack_shard, tokenizer.to_str(), source, rows_per_shard, row_length)
    with multiprocessing.get_context("fork").Pool() as pool:
        shards = pool.map(work, seeds, chunksize=1)
    return Rows(
        np.concatenate([shard.ids_RT for shard in shards]),
        np.concatenate([shard.learned_RT for shard in shards]),
        np.concatenate([shard.segment_RT for shard in shards]),
    )
