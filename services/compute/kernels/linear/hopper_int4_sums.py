"""What becomes of a tile's sums in hopper_int4: results, or parts of them that meet in memory.

Shape legend: M outputs of a warpgroup, N tokens of a tile, C tokens that are stored at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from services.compute.kernels.linear.hopper_int4_config import CHUNK

PART = gl.constexpr(CHUNK)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # the name in Triton 3.7, in 3.6


@gluon.jit
def _halves(acc_MN):
    """Of the tokens."""
    M: gl.constexpr = acc_MN.shape[0]
    C: gl.constexpr = acc_MN.shape[1] // 2
    return acc_MN.reshape([M, 2, C]).permute(0, 2, 1).split()


@gluon.jit
def _chunks(acc_MN):
    if acc_MN.shape[1] == 4 * PART:
        low, high = _halves(acc_MN)
        chunks = _halves(low) + _halves(high)
    elif acc_MN.shape[1] == 2 * PART:
        chunks = _halves(acc_MN)
    else:
        chunks = (acc_MN,)
    return chunks


@gluon.jit
def _store_chunk(HALF: gl.constexpr, OF_TAIL: gl.constexpr, results, acc_MC, output, token):
    """Round, turn and store the sums of a tile's chunk of tokens, by way of shared memory."""
    outs, stagings, bias, num_out = results
    M: gl.constexpr = acc_MC.shape[0]
    C: gl.constexpr = acc_MC.shape[1]
    if OF_TAIL:
        out, buffer = outs[1], stagings[1].index(HALF * (stagings[0].shape[1] // C))
    else:
        out, buffer = outs[0], stagings[0].index(HALF)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    acc_MC = gl.convert_layout(acc_MC, layout)
    if bias is not None:
        o_M = output + gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        acc_MC += gl.load(bias + o_M, mask=o_M < num_out, other=0.0).to(gl.float32)[:, None]
    tma.store_wait(0)
    buffer.store(acc_MC.to(buffer.dtype).permute(1, 0))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [token, output], buffer)


@gluon.jit
def store(HALF: gl.constexpr, TAIL: gl.constexpr, results, acc, tail, output, token):
    """A warpgroup's sums of a whole tile."""
    chunks = _chunks(acc)
    C: gl.constexpr = min(acc.shape[1], PART)
    for number in gl.static_range(len(chunks)):
        _store_chunk(HALF, False, results, chunks[number], output, token + number * C)
    if TAIL > 0:
        _store_chunk(HALF, True, results, tail, output, token + acc.shape[1])


@gluon.jit
def _places(partial, M: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    m_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    c_C = gl.arange(0, C, layout=gl.SliceLayout(0, layout))
    return partial + m_M[:, None] * C + c_C[None, :]


@gluon.jit
def _leave(partial, acc, TAIL: gl.constexpr, tail):
    """A warpgroup's sums of a part of a tile's inputs."""
    chunks = _chunks(acc)
    M: gl.constexpr = acc.shape[0]
    C: gl.constexpr = min(acc.shape[1], PART)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    for number in gl.static_range(len(chunks)):
        at = _places(partial + number * (M * C), M, C)
        gl.store(at, gl.convert_layout(chunks[number], layout))
    if TAIL > 0:
        gl.store(_places(partial + M * acc.shape[1], M, TAIL), tail)


@gluon.jit
def _added(
    partials, first, last, begin, share, SIZE: gl.constexpr, M: gl.constexpr, C: gl.constexpr
):
    """The sums of programs first..last, in this order. A program whose steps begin before this
    tile's has them in its second place."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    places = _places(partials, M, C)
    total = gl.zeros([M, C], gl.float32, layout=layout)
    for program in range(first, last + 1):
        place = 2 * program + (program * share < begin).to(gl.int32)
        # past the first-level cache, which knows nothing of other programs' writes
        total += gl.load(places + place.to(gl.int64) * SIZE, cache_modifier=".cg")
    return total


@gluon.jit
def meet(
    HALF: gl.constexpr, TAIL: gl.constexpr, results, meeting, acc, tail, output, token, tile,
    share, steps,
):  # fmt: skip
    """Leave a warpgroup's sums of a part of a tile; the last of those that share it adds up all."""
    partials, arrivals = meeting
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    C: gl.constexpr = min(N, PART)
    SIZE: gl.constexpr = M * (N + TAIL)
    begin = tile * steps
    first, last = begin // share, (begin + steps - 1) // share
    second = (gl.program_id(0) * share < begin).to(gl.int32)
    own = 4 * gl.program_id(0) + 2 * second + HALF
    _leave(partials + own.to(gl.int64) * SIZE, acc, TAIL, tail)
    # All threads' sums are written before the one thread that says so releases them; the program
    # that finds itself last acquires everybody's.
    _barrier()
    counter = arrivals + tile * 2 + HALF
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last - first:
        gl.store(counter, 0)
        for number in gl.static_range(N // C):
            at = partials + HALF * SIZE + number * (M * C)
            total = _added(at, first, last, begin, share, 2 * SIZE, M, C)
            _store_chunk(HALF, False, results, total, output, token + number * C)
        if TAIL > 0:
            at = partials + HALF * SIZE + M * N
            total = _added(at, first, last, begin, share, 2 * SIZE, M, TAIL)
            _store_chunk(HALF, True, results, total, output, token + N)
