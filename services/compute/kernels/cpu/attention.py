"""Attention of rows of one query each, straight over the pages of their keys and values."""

from __future__ import annotations

import numpy as np
import torch

from services.compute.kernels.cpu.language import LIKE, compiled, exp, narrow, pointer, wide
from services.compute.kernels.cpu.team import INT, in_team, own_part, worker

FLOAT, DOUBLE, BFLOAT16 = np.float32(0), np.float64(0), LIKE[torch.bfloat16]

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
    work = pointer(work_ptr, 0, INT)
    work[Q], work[PAGES], work[ROWS], work[SINKS] = q_ptr, pages_ptr, rows_ptr, sinks_ptr
    pointer(work_ptr, SOFTCAP, DOUBLE)[0] = softcap
    in_team(work[TEAM], mix, work_ptr)


@compiled
def _mix(work, row, head, softcap, like):
    """What one head of a row makes of the values that it sees."""
    form, rows = pointer(work[FORM], 0, INT), pointer(work[ROWS], 0, INT)
    num_rows, heads, kv_heads, page_tokens, page_size = form[0], form[1], form[2], form[3], form[4]
    width, table_width = form[5], form[6]
    first, end = rows[num_rows + row], rows[row] + 1
    table = pointer(work[ROWS], 2 * num_rows + row * table_width, INT)
    keys_at = head * kv_heads // heads * page_tokens * width
    values_at = keys_at + kv_heads * page_tokens * width
    q = pointer(work[Q], row * work[Q_STRIDE] + head * width, like)
    out = pointer(work[OUT], (row * heads + head) * width, like)
    query, mixed = np.empty(width, np.float32), np.zeros(width, np.float32)
    scores = np.empty(end - first, np.float32)
    for i in range(width):
        query[i] = wide(q[i])
    highest = np.float32(-np.inf)
    for position in range(first, end):
        page, place = table[position // page_tokens], position % page_tokens
        key = pointer(work[PAGES], page * page_size + keys_at + place * width, like)
        score = np.float32(0)
        for i in range(width):
            score += query[i] * wide(key[i])
        if softcap != 0.0:
            score = np.float32(softcap * np.tanh(score / softcap))
        scores[position - first] = score
        highest = max(highest, score)
    total = np.float32(0)
    if work[SINKS]:
        sink = pointer(work[SINKS], head, FLOAT)[0]
        highest = max(highest, sink)
        total = exp(sink - highest)
    for n in range(end - first):
        scores[n] = exp(scores[n] - highest)
        total += scores[n]
    for position in range(first, end):
        page, place = table[position // page_tokens], position % page_tokens
        value = pointer(work[PAGES], page * page_size + values_at + place * width, like)
        weight = scores[position - first]
        for i in range(width):
            mixed[i] += weight * wide(value[i])
    for i in range(width):
        out[i] = narrow(mixed[i] / total, like)


@compiled
def _mix_part(work_ptr, like):
    work = pointer(work_ptr, 0, INT)
    form = pointer(work[FORM], 0, INT)
    softcap = np.float32(pointer(work_ptr, SOFTCAP, DOUBLE)[0])
    first, last = own_part(work[TEAM], form[0] * form[1])
    for job in range(first, last):
        _mix(work, job // form[1], job % form[1], softcap, like)


@worker
def mix_bfloat16(work_ptr):
    _mix_part(work_ptr, BFLOAT16)


@worker
def mix_float32(work_ptr):
    _mix_part(work_ptr, FLOAT)


MIX = {torch.bfloat16: mix_bfloat16.address, torch.float32: mix_float32.address}
