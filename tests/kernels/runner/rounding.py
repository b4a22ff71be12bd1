"""How far logits are from exact ones, and how to get a runner's logits for many positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import logits_after_step
from tests.unit.compute.hand_scheduler import HandScheduler, Sequence


@dataclass(frozen=True, slots=True)
class Errors:
    """Of logits at some positions: ||a - b|| / ||b|| and how often the best token is the same."""

    rms: float
    worst: float
    median: float
    top1: float

    @staticmethod
    def of(logits_NV: Tensor, exact_NV: Tensor) -> Errors:
        """Of the logits after N positions."""
        error_N = (logits_NV - exact_NV).norm(dim=-1) / exact_NV.norm(dim=-1)
        assert bool(error_N.isfinite().all())
        same_N = logits_NV.argmax(dim=-1) == exact_NV.argmax(dim=-1)
        return Errors(
            rms=error_N.square().mean().sqrt().item(),
            worst=error_N.max().item(),
            median=error_N.median().item(),
            top1=same_N.float().mean().item(),
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What errors may be: by themselves, and beside those of transformers in the same dtype."""

    rms: float
    worst: float
    top1: float
    of_theirs: float  # medians: a position where two heads tie has ten times the error of most

    def check(self, ours: Errors, theirs: Errors) -> None:
        """All have to hold; where their top-1 rate is low itself, ours may be a little lower."""
        assert ours.rms <= self.rms, (ours, theirs)
        assert ours.worst <= self.worst, (ours, theirs)
        assert ours.median <= self.of_theirs * theirs.median, (ours, theirs)
        assert ours.top1 >= min(self.top1, theirs.top1 - 0.04), (ours, theirs)


@torch.inference_mode()
def logits_of_transformers(
    folder: Path, text: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Float32 logits [T, V] on the host after every token of the text, computed in this dtype.

    The model is loaded in it: `model.to(dtype)` would round the rotation's frequencies, too.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    logits: Tensor = model(torch.tensor([text], device=device)).logits[0]
    return logits.float().cpu()


class Positions:
    """A runner's logits after the first n tokens of one text, for many n."""

    def __init__(self, runner: PackingRunner, page_tokens: int, text: list[int]) -> None:
        self._runner = runner
        self._page_tokens = page_tokens
        self._text = text

    def prefilled(self, lengths: list[int], chunk: int = 1 << 30) -> Tensor:
        """Each length is a prompt of its own, four of them in a step as long as they last."""
        fours = [lengths[first : first + 4] for first in range(0, len(lengths), 4)]
        return torch.cat([self._prefill(four, chunk) for four in fours])

    def decoded(self, lengths: list[int], count: int) -> Tensor:
        """Prompts of these lengths, decoded along the text for `count` steps, [count * L, V].

        Ordered by step; after step i and length n there are n + i + 1 tokens.
        """
        hand = HandScheduler(self._runner, self._page_tokens)
        sequences = [hand.add(self._text[:length]) for length in lengths]
        for sequence in sequences:
            hand.step((sequence, len(sequence.prompt)))
        rows = []
        for _ in range(count):
            for sequence in sequences:  # the text's next token, whatever was sampled
                known = len(sequence.prompt) + len(sequence.output)
                sequence.output[-1] = self._text[known - 1]
            hand.step(*((sequence, 1) for sequence in sequences))
            rows.append(logits_after_step(self._runner, len(sequences)))
        return torch.cat(rows)

    def _prefill(self, lengths: list[int], chunk: int) -> Tensor:
        hand = HandScheduler(self._runner, self._page_tokens)
        rows: dict[int, Tensor] = {}
        sequences = [hand.add(self._text[:length]) for length in lengths]
        while open_ones := [s for s in sequences if not s.output]:
            launched = hand.launch(*((s, hand.next_queries(s, chunk)) for s in open_ones))
            hand.finish(launched)
            sampled: list[Sequence] = launched[1]
            logits_SV = logits_after_step(self._runner, len(sampled))
            rows.update({s.slot: row for s, row in zip(sampled, logits_SV, strict=True)})
        return torch.stack([rows[s.slot] for s in sequences])
