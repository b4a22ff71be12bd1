"""What chunks see of themselves and what they see of their contexts become attention to all."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.latent_chunks import latent_context_attention, mark_contexts
from services.compute.kernels.latent_heads import OwnResults, expand_values
from services.compute.kernels.latent_prefill import (
    ExpandedChunks,
    own_chunk_attention,
    own_chunk_attention_reference,
)
from services.compute.kernels.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.step_buffers import NUM_DECODE_ROWS, NUM_ROWS, NUM_TOKENS, StepInputs
from tests.kernels.latent_steps import MAX_ROWS, Shape, Step

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LENGTHS = [1, 1, 70, 33, 1, 64]
DECODES = 2


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("widths", [(16, 8, 12), (24, 16, 40)])  # still, rotated, value
def test_what_chunks_see_of_themselves(
    widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    (still, rotated, value), heads, bucket = widths, 3, sum(LENGTHS) + 4
    inputs = StepInputs.make(bucket, MAX_ROWS, device)
    lengths = torch.tensor(LENGTHS)
    inputs.q_len_R[: len(LENGTHS)] = lengths
    inputs.token_start_R[: len(LENGTHS)] = lengths.cumsum(0) - lengths
    inputs.counts[NUM_ROWS], inputs.counts[NUM_DECODE_ROWS] = len(LENGTHS), DECODES
    inputs.counts[NUM_TOKENS] = sum(LENGTHS)
    work = PrefillWork.make(bucket, MAX_ROWS, 1, device)
    plan_prefill(inputs, work, bucket)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    q = random(bucket, heads, still + rotated)
    entries = random(bucket, rotated + 7)
    outputs = [random(bucket, heads, value), torch.zeros(bucket, heads, device=device)]
    expected = [part.clone() for part in outputs]
    before = ExpandedChunks(
        q[:, :, :still],
        q[:, :, still:],
        random(bucket, heads, still),
        entries[:, 7:],
        random(bucket, heads, value),
        *outputs,
        (still + rotated) ** -0.5,
    )
    own_chunk_attention(before, inputs, work, bucket)
    after = before._replace(out_THV=expected[0], sums_TH=expected[1])
    own_chunk_attention_reference(after, inputs, range(DECODES, len(LENGTHS)))
    for found, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_results_of_chunks_and_of_contexts_become_one(device: torch.device) -> None:
    """Of latents that are keys and values as they are, of a map that is one."""
    shape = Shape()
    rows = [(11, 1), (0, 19), (30, 5), (64, 11)]
    step = Step(shape, rows, 1, device)
    call, rank = step.call(), shape.latent_dim
    one = torch.eye(rank, device=device).expand(shape.heads, rank, rank).contiguous()
    sums = [torch.full((step.bucket, shape.heads), torch.nan, device=device) for _ in range(2)]
    whole = torch.full_like(call.out_THD, torch.nan)

    # what a chunk sees of itself: its own last entries in the pages
    entries = torch.zeros(step.bucket, shape.width, device=device)
    for row, (start, count) in enumerate(rows):
        first, slot = int(step.inputs.token_start_R[row]), int(step.inputs.row_slot_R[row])
        own = step.layer.entries[step.table[slot].long(), 0, 0].flatten(0, 1)[start : start + count]
        entries[first : first + count] = own
    latents_THR = entries[:, None, :rank].expand(-1, shape.heads, -1).contiguous()
    chunks = ExpandedChunks(
        step.q_THW[:, :, :rank],
        step.q_THW[:, :, rank:],
        latents_THR,
        entries[:, rank:],
        latents_THR,
        whole,
        sums[0],
        call.scale,
    )
    work = PrefillWork.make(step.bucket, MAX_ROWS, 1, device)
    plan_prefill(step.inputs, work, step.bucket)
    own_chunk_attention(chunks, step.inputs, work, step.bucket)

    contexts = PrefillWork.make(step.bucket, MAX_ROWS, shape.heads, device)
    plan_prefill(step.inputs, contexts, step.bucket, after_contexts=True)
    mark_contexts(step.inputs, sums[1], step.bucket)
    latent_context_attention(call, step.inputs, contexts, step.bucket, sums[1])
    assert call.out_THD[:20].isnan().all()  # without a context nothing is written
    call.out_THD[0] = 5.0  # a decode row's
    expand_values(call.out_THD, one, whole, beside=OwnResults(*sums, step.inputs.counts))
    assert (whole[0] == 5.0).all()
    expected = step.expected(range(1, 4))
    tokens = slice(1, step.num_tokens)
    torch.testing.assert_close(
        whole[tokens], expected[tokens].to(whole.dtype), rtol=1e-4, atol=1e-5
    )
