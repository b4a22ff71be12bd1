"""Attention of rows of one query each, straight over the pages of their keys and values."""

from __future__ import annotations

import numpy as np
import torch

from services.compute.kernels.cpu.heads import (
    HEADS,
    KEYS,
    LANES,
    VECTORS,
    add_vector,
    add_vectors,
    fetch,
    score,
    scores,
)
from services.compute.kernels.cpu.language import (
    LIKE,
    compiled,
    exp,
    narrow,
    of_bits,
    pointer,
    size_of,
    wide,
)
from services.compute.kernels.cpu.team import INT, call, in_team, own_part, worker

FLOAT, DOUBLE, BFLOAT16 = np.float32(0), np.float64(0), LIKE[torch.bfloat16]

LINE_BYTES = 64
REST, LOWEST = np.int32(0x7FFFFFFF), np.int32(-(2**31))

WORK = FORM, TEAM, Q_STRIDE, OUT, Q, PAGES, ROWS, SINKS, SOFTCAP = range(9)
"""What there is to do: the first four are the same in all layers of a step."""


@compiled
def rotate(x_ptr, cos_ptr, sin_ptr, num_rows, stride, num_heads, width, like):
    """Turn the heads of rows, `stride` numbers apart, by cosines and signed sines [T, N, D]."""
    half = width // 2
    for row in range(num_rows):
        for head in range(num_heads):
            x = pointer(x_ptr, row * stride + head * width, like)
            first = (row * num_heads + head) * width
            cos, sin = pointer(cos_ptr, first, like), pointer(sin_ptr, first, like)
            for i in range(half):
                left, right = wide(x[i]), wide(x[i + half])
                x[i] = narrow(left * wide(cos[i]) + right * wide(sin[i]), like)
                turned = right * wide(cos[i + half]) + left * wide(sin[i + half])
                x[i + half] = narrow(turned, like)


@compiled
def store(kv_ptr, kv_stride, pages_ptr, form_ptr, rows_ptr, like):
    """Write the rows' keys and values [T, 2, K, D] where they belong."""
    form, rows = pointer(form_ptr, 0, INT), pointer(rows_ptr, 0, INT)
    num_rows, kv_heads, page_tokens, page_size = form[0], form[2], form[3], form[4]
    width, table_width = form[5], form[6]
    for row in range(num_rows):
        page = rows[2 * num_rows + row * table_width + rows[row] // page_tokens]
        place = rows[row] % page_tokens
        for head in range(2 * kv_heads):
            source = pointer(kv_ptr, row * kv_stride + head * width, like)
            first = page * page_size + (head * page_tokens + place) * width
            target = pointer(pages_ptr, first, like)
            for i in range(width):
                target[i] = source[i]


@compiled
def attend(work_ptr, q_ptr, pages_ptr, rows_ptr, sinks_ptr, softcap, mix):
    """Mix all heads of the rows; `mix` is the address of a worker. The rows are their positions,
    the first that each sees, and their tables of pages."""
    work = _begun(work_ptr, q_ptr, pages_ptr, rows_ptr, sinks_ptr, softcap)
    in_team(work[TEAM], mix, work_ptr)


@compiled
def part_of_attend(team_ptr, work_ptr, q_ptr, pages_ptr, rows_ptr, sinks_ptr, softcap, mix):
    """A member's part of `attend`, whatever team there is to do it otherwise."""
    work = _begun(work_ptr, q_ptr, pages_ptr, rows_ptr, sinks_ptr, softcap)
    work[TEAM] = team_ptr
    call(mix, work_ptr)


@compiled
def _begun(work_ptr, q_ptr, pages_ptr, rows_ptr, sinks_ptr, softcap):
    work = pointer(work_ptr, 0, INT)
    work[Q], work[PAGES], work[ROWS], work[SINKS] = q_ptr, pages_ptr, rows_ptr, sinks_ptr
    pointer(work_ptr, SOFTCAP, DOUBLE)[0] = softcap
    return work


@compiled
def _score(num_heads, queries, keys, values, ahead, width, count, out, stride, like):
    """Scores of so many keys that follow one another. Memory brings their values meanwhile, and
    what lies at `ahead`: the next page's keys."""
    size, whole = width * size_of(like), count // KEYS * KEYS
    for n in range(0, whole, KEYS):
        for line in range(n * size, (n + KEYS) * size, LINE_BYTES):
            fetch(values + line)
            fetch(ahead + line)
        scores(num_heads, queries, keys + n * size, width, out + 4 * n, stride, like)
    for n in range(whole, count):
        score(num_heads, queries, keys + n * size, width, out + 4 * n, stride, like)


@compiled
def _add_values(num_heads, weights, stride, values, width, count, out, like):
    """Add so many that follow one another, times their weights."""
    together = VECTORS * LANES
    whole = width // together * together
    for i in range(0, whole, together):
        at = values + i * size_of(like)
        add_vectors(num_heads, weights, stride, at, width, count, out + 4 * i, like)
    for i in range(whole, width, LANES):
        at = values + i * size_of(like)
        add_vector(num_heads, weights, stride, at, width, count, out + 4 * i, like)


@compiled
def _weigh(scores, softcap, sinks_ptr, head):
    """Make weights of a head's scores; returns what they add up to."""
    if softcap != 0.0:
        for n in range(len(scores)):
            scores[n] = np.float32(softcap * np.tanh(scores[n] / softcap))
    # Vectors compare whole numbers, which are in the order of the numbers so; NaN is the highest.
    bits, most = scores.view(np.int32), LOWEST
    for n in range(len(bits)):
        most = max(most, np.int32(bits[n] ^ ((bits[n] >> 31) & REST)))
    highest = of_bits(np.int32(most ^ ((most >> 31) & REST)))
    total = np.float32(0)
    if sinks_ptr:
        sink = pointer(sinks_ptr, head, FLOAT)[0]
        highest = max(highest, sink)
        total = exp(sink - highest)
    for n in range(len(scores)):
        scores[n] = exp(scores[n] - highest)
        total += scores[n]
    return total


@compiled
def _mix(work, row, head, num_heads, softcap, like):
    """What some heads of a row, which share keys, make of the values that it sees."""
    form, rows = pointer(work[FORM], 0, INT), pointer(work[ROWS], 0, INT)
    num_rows, heads, kv_heads, page_tokens, page_size = form[0], form[1], form[2], form[3], form[4]
    width, table_width = form[5], form[6]
    first, end = rows[num_rows + row], rows[row] + 1
    table = pointer(work[ROWS], 2 * num_rows + row * table_width, INT)
    keys_at = head * kv_heads // heads * page_tokens * width
    values_at = keys_at + kv_heads * page_tokens * width
    stride = end - first
    queries = np.empty(num_heads * width, np.float32)
    weights, mixed = np.empty(num_heads * stride, np.float32), np.zeros_like(queries)
    q = pointer(work[Q], row * work[Q_STRIDE] + head * width, like)
    for i in range(num_heads * width):
        queries[i] = wide(q[i])
    position = first
    while position < end:
        page, place = table[position // page_tokens], position % page_tokens
        count = min(page_tokens - place, end - position)
        keys = work[PAGES] + (page * page_size + keys_at + place * width) * size_of(like)
        values = work[PAGES] + (page * page_size + values_at + place * width) * size_of(like)
        at = weights.ctypes.data + 4 * (position - first)
        following = table[min(position + count, end - 1) // page_tokens]
        ahead = work[PAGES] + (following * page_size + keys_at) * size_of(like)
        _score(num_heads, queries.ctypes.data, keys, values, ahead, width, count, at, stride, like)
        position += count
    for n in range(num_heads):
        of_head = weights[n * stride : (n + 1) * stride]
        of_head /= _weigh(of_head, softcap, work[SINKS], head + n)
    position = first
    while position < end:
        page, place = table[position // page_tokens], position % page_tokens
        count = min(page_tokens - place, end - position)
        values = work[PAGES] + (page * page_size + values_at + place * width) * size_of(like)
        at = weights.ctypes.data + 4 * (position - first)
        _add_values(num_heads, at, stride, values, width, count, mixed.ctypes.data, like)
        position += count
    out = pointer(work[OUT], (row * heads + head) * width, like)
    for i in range(num_heads * width):
        out[i] = narrow(mixed[i], like)


@compiled
def _mix_part(work_ptr, like):
    """A job is up to HEADS heads of a row that share keys."""
    work = pointer(work_ptr, 0, INT)
    form = pointer(work[FORM], 0, INT)
    softcap = np.float32(pointer(work_ptr, SOFTCAP, DOUBLE)[0])
    of_keys = form[1] // form[2]
    parts = (of_keys + HEADS - 1) // HEADS
    first, last = own_part(work[TEAM], form[0] * form[2] * parts)
    for job in range(first, last):
        keys, part = job // parts, job % parts
        begin, end = of_keys * part // parts, of_keys * (part + 1) // parts
        head = keys % form[2] * of_keys + begin
        _mix(work, keys // form[2], head, end - begin, softcap, like)


@worker
def mix_bfloat16(work_ptr):
    _mix_part(work_ptr, BFLOAT16)


@worker
def mix_float32(work_ptr):
    _mix_part(work_ptr, FLOAT)


MIX = {torch.bfloat16: mix_bfloat16.address, torch.float32: mix_float32.address}
