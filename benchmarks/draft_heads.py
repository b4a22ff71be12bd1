"""What heads that were trained for some minutes are worth on a CPU: one stream, in turn.

    python -m benchmarks.draft_heads [--minutes 4] [--rounds 5] [--keep FOLDER]

An EAGLE-3 head and Medusa heads learn what the demo model says of the conversations that it was
trained on. Then servers that draft with them answer what benchmarks/drafts.py asks.

Shape legend: B texts, T tokens, V vocabulary, K drafts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.drafts import DEMO, MAX_TOKENS, TASKS, measure
from benchmarks.report import Report
from benchmarks.stack import Stack
from models.demo.training.corpus import conversations
from models.demo.training.tokenizer import encode
from tests.unit.compute.draft_heads import Eagle3, Head, Medusa

SEED = 5
LENGTH, BATCH = 128, 8
RATE = 2e-3
NUM_DRAFTS = 3
LAYERS = (2, 4, 5)  # of six, whose inputs the EAGLE-3 head sees
FURTHER_WEIGHT = 0.7  # of each further draft in the loss


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Texts [B, T], and which of their tokens the model is to say."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    stream = conversations(SEED)
    while True:
        encoded = encode(tokenizer, list(islice(stream, BATCH)))
        ids_BT = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        learned_BT = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        for row, (ids, learned) in enumerate(encoded):
            count = min(len(ids), LENGTH)
            ids_BT[row, :count] = torch.tensor(ids[:count])
            learned_BT[row, :count] = torch.tensor(learned[:count])
        yield ids_BT, learned_BT


class Said:
    """What the model makes of texts."""

    def __init__(self, model: LlamaForCausalLM, ids_BT: Tensor, learned_BT: Tensor) -> None:
        self._model, self._learned_BT = model, learned_BT
        with torch.no_grad():
            self.states = model.model(ids_BT, output_hidden_states=True).hidden_states
            self.embedded = model.get_input_embeddings()(ids_BT)

    def loss(self, logits_of: Callable[[Tensor], Tensor], x_BTE: Tensor, first: int) -> Tensor:
        """Of guesses for what follows the tokens from `first` on, where it is to be learned."""
        wanted_BT = self._learned_BT[:, first + 1 :]
        guesses = logits_of(x_BTE[:, : wanted_BT.shape[1]][wanted_BT]).log_softmax(-1)
        said = self._model.lm_head(self.states[-1][:, first:-1][wanted_BT]).softmax(-1)
        return -(said * guesses).sum(-1).mean()


def eagle3_loss(head: Eagle3, said: Said) -> Tensor:
    x_BTE = head.kept([said.states[layer] for layer in head.layers])
    total = torch.zeros(())
    for number in range(NUM_DRAFTS):
        x_BTE = head.own(said.embedded[:, number + 1 :], x_BTE[:, :-1])
        total = total + FURTHER_WEIGHT**number * said.loss(head.logits, x_BTE, number + 1)
    return total


def medusa_loss(head: Medusa, said: Said) -> Tensor:
    total = torch.zeros(())
    for number in range(NUM_DRAFTS):
        guess = partial(head.guess, number=number)
        total = total + FURTHER_WEIGHT**number * said.loss(guess, said.states[-1], number + 1)
    return total


def train(head: Head, loss_of: Callable[[Any, Said], Tensor], minutes: float) -> int:
    """Returns in how many steps."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.98))
    began_s, num_steps, shown = time.monotonic(), 0, 0.0
    for batch in batches():
        done = (time.monotonic() - began_s) / (60.0 * minutes)
        if done >= 1.0:
            break
        rate = RATE * 0.5 * (1.0 + math.cos(math.pi * done)) * min(1.0, (num_steps + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(head, Said(head.model, *batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        num_steps += 1
        if done >= shown:
            print(f"{type(head).__name__}: step {num_steps}, loss {loss.item():.3f}", flush=True)
            shown += 0.1
    return num_steps


@torch.no_grad()
def begin(eagle3: Eagle3, medusa: Medusa, model: LlamaForCausalLM) -> None:
    """Heads that say what the model's own weights make them say: minutes are few."""
    width, last = model.config.hidden_size, model.model.layers[-1]
    own = eagle3.midlayer
    eagle3.layers = LAYERS
    eagle3.fc.weight.zero_()[:, -width:].fill_diagonal_(1.0)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(own.self_attn, name).weight[:, width:] = getattr(last.self_attn, name).weight
    own.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
    own.mlp.load_state_dict(last.mlp.state_dict())
    own.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    own.hidden_norm.weight.copy_(last.input_layernorm.weight)
    eagle3.norm.weight.copy_(model.model.norm.weight)
    eagle3.lm_head.weight.copy_(model.lm_head.weight)
    for number in range(NUM_DRAFTS):  # as Medusa's authors begin
        block, head = getattr(medusa, str(number))
        torch.nn.init.zeros_(block["linear"].weight)
        torch.nn.init.zeros_(block["linear"].bias)
        head.weight.copy_(model.lm_head.weight)


def trained(folder: Path, minutes: float) -> dict[str, str]:
    """Train heads, as the settings that name them."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    ).requires_grad_(False)
    eagle3, medusa = Eagle3(model, model.config.vocab_size), Medusa(model, NUM_DRAFTS)
    begin(eagle3, medusa, model)
    if not (folder / "eagle3").is_dir():
        train(eagle3, eagle3_loss, minutes)
        eagle3.save(
            folder / "eagle3",
            architectures=["LlamaForCausalLMEagle3"],
            draft_vocab_size=model.config.vocab_size,
            eagle_aux_hidden_state_layer_ids=LAYERS,
        )
    if not (folder / "medusa").is_dir():
        train(medusa, medusa_loss, minutes)
        medusa.save(folder / "medusa", medusa_num_heads=NUM_DRAFTS, medusa_num_layers=1)
    return {
        method: json.dumps(
            {
                "method": method,
                "model": str(folder / method),
                "num_speculative_tokens": NUM_DRAFTS,
            }
        )
        for method in ("eagle3", "medusa")
    }


def main() -> None:
    """Read the command line, train, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="of training, for each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="a folder for the heads; those there are taken")
    arguments = parser.parse_args()
    options = "--device", "cpu", "--served-model-name", "demo", "--speculative-config"
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configs = trained(folder, arguments.minutes)
        configs["the text"] = json.dumps({"num_speculative_tokens": NUM_DRAFTS})
        without = stack.enter_context(Stack(DEMO, *options, "off"))
        drafting = {
            name: stack.enter_context(Stack(DEMO, *options, config))
            for name, config in configs.items()
        }
        rows = [
            [task, *row]
            for task, bodies in TASKS.items()
            for row in measure(without, drafting, bodies, arguments.rounds)
        ]
    report = Report(
        "draft_heads",
        "Heads that draft, on a CPU",
        "Target: more drafts right than from the text, where the text repeats nothing.",
    )
    report.text(
        f"The demo model over HTTP, greedy, at most {MAX_TOKENS} tokens, {arguments.rounds} "
        f"rounds, all servers in turn; {NUM_DRAFTS} drafts a row, always, of an EAGLE-3 head and "
        f"of Medusa heads that were each trained for {arguments.minutes:g} minutes on these "
        "cores, or from the text. All texts were equal."
    )
    columns = ["one stream", "tokens/s without", "drafts from", "with drafts, times", "range"]
    columns += ["drafts", "right"]
    report.table(columns, rows)
    report.write()


if __name__ == "__main__":
    main()
