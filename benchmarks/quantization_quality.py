"""What quantization at load costs the demo model: held-out questions answered, and perplexity.

    python -m benchmarks.quantization_quality [--scale 0.25] [--kind int4] [--dtype bfloat16]
                                              [--rounded-inputs]

transformers runs the model with our linear maps in the place of its own, weights quantized as
`--quantization` does, on the CPU. Perplexity is of the held-out questions' right answers. With
`--rounded-inputs` inputs are rounded as on a GPU that multiplies codes by codes, in all maps.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.report import Report
from models.demo.training.conversation import Question
from models.demo.training.corpus import guided_questions, held_out_questions
from models.demo.training.evaluate import SHIPPED, Examinee, share
from models.demo.training.tokenizer import END, PAD
from services.compute.kernels.rows.quantized_rows import RowForm, quantize_rows_reference
from services.compute.layers.compiled_linear import CompiledLinears
from services.compute.layers.weighted_layers import LinearMap
from services.compute.quantization.at_load import Quantization, quantized
from services.compute.quantization.packed import Packed, Weight

CPU = torch.device("cpu")
KINDS: tuple[Quantization | None, ...] = (None, "fp8", "int8", "int4")
DTYPES = ("float32", "bfloat16")
ANSWERS_AT_ONCE = 32
MakeLinear: TypeAlias = "Callable[[Weight, Tensor | None], LinearMap]"


class Mapped(nn.Module):
    """One of our linear maps as transformers calls its own."""

    def __init__(self, linear: LinearMap) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class RoundedInputs:
    """A linear map whose inputs become codes, as the kernels' reference has it."""

    def __init__(self, weight: Weight, bias_O: Tensor | None) -> None:
        assert isinstance(weight, Packed)
        self._form = RowForm("fp8" if weight.inputs_8bit else "int16")
        self._weight, self._bias_O = weight, bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        rounded_TI = quantize_rows_reference(x_TI, self._form).dense(x_TI.dtype)
        return F.linear(rounded_TI, self._weight.dense(x_TI.dtype), self._bias_O)


def quantize(model: nn.Module, kind: Quantization, make: MakeLinear) -> None:
    """Give all linear maps quantized weights, as at the start of a server: the head 8 bits."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            weight = quantized(module.weight.detach(), "int8" if path == "lm_head" else kind)
            setattr(model.get_submodule(parent), name, Mapped(make(weight, module.bias)))


class Candidate(Examinee):
    """A demo model in one dtype, quantized or not."""

    def __init__(self, kind: Quantization | None, dtype: torch.dtype, rounds_inputs: bool) -> None:
        super().__init__(SHIPPED, dtype, CPU)
        if kind is not None:
            quantize(
                self._model, kind, RoundedInputs if rounds_inputs else CompiledLinears(dtype, True)
            )

    @torch.inference_mode()
    def perplexity(self, questions: Sequence[Question]) -> float:
        """Of the right answers, each behind its question."""
        prompts = [self.prompt(question) for question in questions]
        answers = [
            [*self._tokenizer.encode(question.expected, add_special_tokens=False), END]
            for question in questions
        ]
        total, count = 0.0, 0
        for first in range(0, len(prompts), ANSWERS_AT_ONCE):
            some = slice(first, first + ANSWERS_AT_ONCE)
            lost, number = self._loss(prompts[some], answers[some])
            total, count = total + lost, count + number
        return math.exp(total / count)

    def _loss(self, prompts: list[list[int]], answers: list[list[int]]) -> tuple[float, int]:
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, rows))
        ids_BT = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
        attended_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        logits_BTV: Any = self._model(input_ids=ids_BT, attention_mask=attended_BT).logits
        total, count = 0.0, 0
        for row, prompt in enumerate(prompts):
            asked = slice(len(prompt) - 1, len(rows[row]) - 1)
            logprobs_TV = logits_BTV[row, asked].float().log_softmax(-1)
            targets_T = torch.tensor(rows[row][len(prompt) :])
            total -= float(logprobs_TV.gather(1, targets_T[:, None]).sum())
            count += len(targets_T)
        return total, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.25, help="share of the questions to ask")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--kind", choices=[kind or "none" for kind in KINDS], action="append")
    parser.add_argument("--rounded-inputs", action="store_true")
    given = parser.parse_args()
    questions = held_out_questions(given.scale) | guided_questions(given.scale)
    plain = [q for asked in questions.values() for q in asked if is_plain(q)]
    rows = []
    for dtype in given.dtype or DTYPES:
        for kind in KINDS:
            if given.kind and (kind or "none") not in given.kind:
                continue
            started = time.monotonic()
            candidate = Candidate(kind, getattr(torch, dtype), given.rounded_inputs)
            perplexity = candidate.perplexity(plain)
            marks = [mark for asked in questions.values() for mark in candidate.sit(asked)]
            wrong = sum(not mark.is_right for mark in marks)
            print(dtype, kind, share(marks), perplexity, f"{time.monotonic() - started:.0f} s")
            rows.append((f"{dtype}, {kind or 'as trained'}", f"{share(marks):.2%}", wrong,
                         f"{perplexity:.4f}"))  # fmt: skip
    report = Report("quantization_quality", "Quality of weights quantized at load",
                    "The demo model (5.2 million weights, for which rounding is harder than for "
                    "large ones) on its held-out questions.")  # fmt: skip
    report.text(f"{sum(map(len, questions.values()))} questions, answered greedily; perplexity of "
                f"the right answers to {len(plain)} of them.")  # fmt: skip
    report.table(["weights", "right", "wrong answers", "perplexity"], rows)
    report.write()


def is_plain(question: Question) -> bool:
    """Whether its right answer is the text that is expected, without thoughts or calls."""
    return not question.thinks and not question.tools and question.grammar is None


if __name__ == "__main__":
    main()
