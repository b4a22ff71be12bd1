"""Prompts scored and pooled by a runner behind the real scheduler, and what transformers says."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.messages.failure import Ending
from common.messages.generate import Generate
from common.messages.sampling import SamplingParams
from services.compute.runner.protocol import Runner
from services.compute.scheduler.outputs import SequenceOutput, sequence_outputs
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import Float32Array
from tests.unit.compute.generate_requests import generate_request


@dataclass
class Heard:
    """What came of one request: logprobs and ranks of its prompt, candidates, tokens, its end."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ending: Ending | None = None

    def hear(self, event: SequenceOutput) -> None:
        """Take an event."""
        for scores in event.scored:
            assert scores.first == len(self.ranks) + 1
            columns = scores.logprobs
            self.ranks += columns.ranks
            ends = accumulate(columns.num_candidates, initial=0)
            for chosen, end in pairwise(ends):
                self.logprobs.append(columns.values[chosen])
                self.top_ids += columns.ids[chosen + 1 : end]
                self.top_logprobs += columns.values[chosen + 1 : end]
        self.tokens += event.token_ids
        self.ending = event.ending or self.ending

    @property
    def embedding(self) -> Float32Array:
        """The answer to a request with pooling."""
        assert self.ending is not None and self.ending.reason == "stop", self.ending
        return np.frombuffer(self.ending.embedding, dtype=np.float32)


def scored(counter: int, prompt: list[int], num_top: int = 0, max_tokens: int = 1) -> Generate:
    """A request whose prompt is scored."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=counter,
        temperature=0.0,
        ignore_eos=True,
        num_prompt_logprobs=num_top,
    )
    return generate_request(counter, prompt, sampling)


def pooled(counter: int, prompt: list[int]) -> Generate:
    """A request for an embedding."""
    sampling = SamplingParams(max_tokens=0, seed=0)
    return generate_request(counter, prompt, sampling, pooling=True)


def run_prompts(
    runner: Runner, requests: list[Generate], chunk: int, in_flight: int = 0, **spec: int
) -> tuple[dict[int, Heard], Scheduler]:
    """Run all requests to their end, each arriving a step after the one before."""
    from tests.unit.compute.engine_server import Restricted

    scheduler = Scheduler(
        Restricted(runner, **spec).spec(),
        SchedulerSettings(max_num_seqs=8, max_prefill_tokens=chunk, in_flight_steps=in_flight),
        DecodeFirst(),
    )
    heard = {request.attempt.counter: Heard() for request in requests}
    waiting, in_the_air = deque(requests), deque()
    while waiting or in_the_air or scheduler.has_work():
        if waiting:
            scheduler.add_request(waiting.popleft(), 0.0)
        plan = scheduler.plan(0.0)
        for transfer in scheduler.take_transfers():
            ticket = runner.transfer(transfer.direction, transfer.pages)
            while not runner.transferred(ticket):
                pass
            scheduler.transferred(transfer)
        if plan is not None:
            in_the_air.append((plan, runner.sample(runner.forward(plan))))
        if in_the_air and (plan is None or len(in_the_air) > in_flight):
            oldest, ticket = in_the_air.popleft()
            scheduler.commit(oldest, runner.result(ticket), 0.0)
        for event in sequence_outputs(scheduler.drain_outputs()):
            heard[event.attempt.counter].hear(event)
    return heard, scheduler


def check_scores(heard: Heard, logits_TV: Tensor, prompt: list[int], num_top: int) -> None:
    """They are those of the model's logits [T, V] over the prompt."""
    logprobs_PV = logits_TV[:-1].double().log_softmax(-1)
    targets_P = torch.tensor(prompt[1:])
    own_P = logprobs_PV.gather(1, targets_P[:, None])[:, 0]
    assert np.allclose(heard.logprobs, own_P.numpy(), rtol=1e-4, atol=1e-4)
    assert heard.ranks == ((logprobs_PV > own_P[:, None]).sum(-1) + 1).tolist()
    top = logprobs_PV.topk(num_top)
    assert heard.top_ids == top.indices.flatten().tolist()
    expected = top.values.flatten().numpy()
    assert np.allclose(heard.top_logprobs, expected, rtol=1e-4, atol=1e-4)


def save_embedding_model(
    model: PreTrainedModel, folder: Path, kind: str, normalize: bool = True
) -> Path:
    """The inside of a language model in the layout of sentence-transformers."""
    model.base_model.save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    names = ["1_Pooling"] + ["2_Normalize"] * normalize
    for number, name in enumerate(names, 1):
        kind_of = name.partition("_")[2]
        modules.append(
            {
                "idx": number,
                "name": str(number),
                "path": name,
                "type": f"sentence_transformers.models.{kind_of}",
            }
        )
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
    config = {f"pooling_mode_{flag}": flag == flags[kind] for flag in flags.values()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


def expected_embedding(
    model: PreTrainedModel, prompt: list[int], kind: str, normalize: bool = True
) -> Float32Array:
    """What transformers' hidden states, after the final norm, come to."""
    with torch.inference_mode():
        hidden_TE = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    pooled_E = {"last": hidden_TE[-1], "mean": hidden_TE.mean(dim=0), "cls": hidden_TE[0]}[kind]
    if normalize:
        pooled_E = torch.nn.functional.normalize(pooled_E, dim=0)
    return pooled_E.numpy()


def logits_of(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """Logits [T, V] of a prompt alone."""
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0]


def random_prompts(vocab_size: int, lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Prompts that share their beginnings."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(3, vocab_size, (max(lengths),), generator=generator).tolist()
    prompts = []
    for length in lengths:
        own = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        keep = length * 2 // 3
        prompts.append(common[:keep] + own[keep:])
    return prompts
