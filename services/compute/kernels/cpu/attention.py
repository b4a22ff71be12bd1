"""Attention of rows of one query each, straight over the pages of their keys and values."""

from __future__ import annotations

import numba
import numpy as np

from services.compute.kernels.cpu.language import (
    compiled,
    exp,
    in_threads,
    narrow,
    pointer,
    wide,
)

FLOAT, INT = np.float32(0), np.int64(0)


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
def mix(
    q_ptr, q_stride, pages_ptr, form_ptr, rows_ptr, sinks_ptr, softcap, out_ptr, row, head, like
):
    """What one head of a row makes of the values that it sees."""
    form, rows = pointer(form_ptr, 0, INT), pointer(rows_ptr, 0, INT)
    num_rows, heads, kv_heads, page_tokens, page_size = form[0], form[1], form[2], form[3], form[4]
    width, table_width = form[5], form[6]
    first, end = rows[num_rows + row], rows[row] + 1
    table = pointer(rows_ptr, 2 * num_rows + row * table_width, INT)
    keys_at = head * kv_heads // heads * page_tokens * width
    values_at = keys_at + kv_heads * page_tokens * width
    q = pointer(q_ptr, row * q_stride + head * width, like)
    out = pointer(out_ptr, (row * heads + head) * width, like)
    query, mixed = np.empty(width, np.float32), np.zeros(width, np.float32)
    scores = np.empty(end - first, np.float32)
    for i in range(width):
        query[i] = wide(q[i])
    highest = np.float32(-np.inf)
    for position in range(first, end):
        page, place = table[position // page_tokens], position % page_tokens
        key = pointer(pages_ptr, page * page_size + keys_at + place * width, like)
        score = np.float32(0)
        for i in range(width):
            score += query[i] * wide(key[i])
        if softcap != 0.0:
            score = np.float32(softcap * np.tanh(score / softcap))
        scores[position - first] = score
        highest = max(highest, score)
    total = np.float32(0)
    if sinks_ptr:
        sink = pointer(sinks_ptr, head, FLOAT)[0]
        highest = max(highest, sink)
        total = exp(sink - highest)
    for n in range(end - first):
        scores[n] = exp(scores[n] - highest)
        total += scores[n]
    for position in range(first, end):
        page, place = table[position // page_tokens], position % page_tokens
        value = pointer(pages_ptr, page * page_size + values_at + place * width, like)
        weight = scores[position - first]
        for i in range(width):
            mixed[i] += weight * wide(value[i])
    for i in range(width):
        out[i] = narrow(mixed[i] / total, like)


@compiled
def attend(q_ptr, q_stride, pages_ptr, form_ptr, rows_ptr, sinks_ptr, softcap, out_ptr, like):
    """Mix all heads of the rows. `rows` are their positions, the first that each sees, and their
    tables of pages."""
    form = pointer(form_ptr, 0, INT)
    for row in range(form[0]):
        for head in range(form[1]):
            mix(
                q_ptr, q_stride, pages_ptr, form_ptr, rows_ptr, sinks_ptr, softcap, out_ptr,
                row, head, like,
            )  # fmt: skip


@in_threads
def attend_in_threads(
    q_ptr, q_stride, pages_ptr, form_ptr, rows_ptr, sinks_ptr, softcap, out_ptr, like
):
    """The same in numba's threads."""
    form = pointer(form_ptr, 0, INT)
    heads = form[1]
    for job in numba.prange(form[0] * heads):
        mix(
            q_ptr, q_stride, pages_ptr, form_ptr, rows_ptr, sinks_ptr, softcap, out_ptr,
            job // heads, job % heads, like,
        )  # fmt: skip
