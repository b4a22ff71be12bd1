"""Trains the demo model from nothing and writes the folder that is shipped.

Run as `python -m models.demo.training.train --out FOLDER` from the root of the repository, with
`--drafter` for the small model that drafts for it and reads the same tokens.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.demo.training.corpus import conversations, long_conversations
from models.demo.training.model import DEMO, DRAFTER, Sizes, new_model, save_model
from models.demo.training.packing import Rows, pack_shards
from models.demo.training.rendering import rendered
from models.demo.training.tokenizer import save_tokenizer, train_tokenizer

ROW_LENGTH, LONG_ROW_LENGTH = 512, 2048
SHIPPED = Path(__file__).resolve().parent.parent
SEEDS_PER_RUN = 1_000_000


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which weights come out, the software and hardware aside."""

    seed: int = 7
    num_steps: int = 10000
    warmup_steps: int = 200
    rows_per_step: int = 128
    peak_rate: float = 2e-3
    weight_decay: float = 0.05
    long_step_every: int = 8
    num_shards: int = 256
    rows_per_shard: int = 1600
    tokenizer_conversations: int = 60_000
    sizes: Sizes = DEMO


def learning_rate(recipe: Recipe, step: int) -> float:
    """Rise in a line, then fall in half a cosine to nothing."""
    if step < recipe.warmup_steps:
        return recipe.peak_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return recipe.peak_rate * 0.5 * (1 + math.cos(math.pi * done))


def batches(rows: Rows, size: int, seed: int) -> Iterator[Rows]:
    """Yield batches without end, in a new order every time round."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).numpy()
        for start in range(0, len(rows) - size + 1, size):
            chosen = order[start : start + size]
            yield Rows(rows.ids_RT[chosen], rows.learned_RT[chosen], rows.segment_RT[chosen])


def loss_of(
    model: LlamaForCausalLM, body: Callable[..., Any], rows: Rows, device: torch.device
) -> torch.Tensor:
    """Average the loss over what is to be learned; conversations do not see each other."""
    ids_BT = torch.from_numpy(rows.ids_RT).to(device, torch.long)
    learned_BT = torch.from_numpy(rows.learned_RT).to(device)
    segment_BT = torch.from_numpy(rows.segment_RT).to(device)
    causal_TT = torch.ones(ids_BT.shape[1], ids_BT.shape[1], device=device).tril().bool()
    visible_BTT = (segment_BT[:, :, None] == segment_BT[:, None, :]) & causal_TT
    with torch.autocast(device.type, torch.bfloat16):
        hidden_BTD = body(
            input_ids=ids_BT, attention_mask=visible_BTT[:, None], use_cache=False
        ).last_hidden_state
        # Only the positions that are learned, less than half of them, pay for logits.
        chosen_ND = hidden_BTD[:, :-1][learned_BT[:, 1:]]
        logits_NV = model.lm_head(chosen_ND)
    return F.cross_entropy(logits_NV.float(), ids_BT[:, 1:][learned_BT[:, 1:]])


def optimizer_of(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Decay the matrices and leave the norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98))


def fit(model: LlamaForCausalLM, recipe: Recipe, short: Rows, long: Rows) -> None:
    """Train for the steps of the recipe, with a batch of long rows now and then."""
    device = next(model.parameters()).device
    optimizer = optimizer_of(model, recipe)
    short_batches = batches(short, recipe.rows_per_step, recipe.seed)
    shrink = LONG_ROW_LENGTH // ROW_LENGTH
    long_batches = batches(long, max(1, recipe.rows_per_step // shrink), recipe.seed + 1)
    # Compiled, a step takes a fraction of the time; on a CPU compiling takes longer than it saves.
    body = torch.compile(model.model, dynamic=False) if device.type == "cuda" else model.model
    started = time.monotonic()
    for step in range(recipe.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        is_long = step % recipe.long_step_every == recipe.long_step_every - 1
        loss = loss_of(model, body, next(long_batches if is_long else short_batches), device)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == recipe.num_steps - 1:
            seconds = time.monotonic() - started
            say(f"step {step} loss {loss.item():.4f} after {seconds:.0f} s")


def say(text: str) -> None:
    """Report progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def train(recipe: Recipe, folder: Path, device: torch.device) -> None:
    """Make the tokenizer and the corpus, fit the model, write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    first_seed = recipe.seed * SEEDS_PER_RUN
    if recipe.sizes == DRAFTER:
        tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    else:
        sample = islice(conversations(first_seed - 1), recipe.tokenizer_conversations)
        tokenizer = train_tokenizer(said.text for c in sample for said in rendered(c))
        say("tokenizer trained")
    save_tokenizer(tokenizer, folder)
    seeds = range(first_seed, first_seed + recipe.num_shards)
    short = pack_shards(tokenizer, conversations, recipe.rows_per_shard, ROW_LENGTH, seeds)
    num_long = max(1, recipe.rows_per_shard // 32)
    long = pack_shards(tokenizer, long_conversations, num_long, LONG_ROW_LENGTH, seeds)
    say(f"{len(short)} rows of {ROW_LENGTH} and {len(long)} of {LONG_ROW_LENGTH} packed")
    model = new_model(recipe.seed, recipe.sizes)
    torch.nn.Module.to(model, device)
    say(f"{sum(p.numel() for p in model.parameters())} parameters")
    fit(model, recipe, short, long)
    save_model(model, folder)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--steps", type=int, default=Recipe.num_steps)
    parser.add_argument("--rows-per-step", type=int, default=Recipe.rows_per_step)
    parser.add_argument("--shards", type=int, default=Recipe.num_shards)
    parser.add_argument("--rows-per-shard", type=int, default=Recipe.rows_per_shard)
    given = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    recipe = Recipe(
        seed=given.seed,
        num_steps=given.steps,
        rows_per_step=given.rows_per_step,
        num_shards=given.shards,
        rows_per_shard=given.rows_per_shard,
        sizes=DRAFTER if given.drafter else DEMO,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(recipe, given.out, device)


if __name__ == "__main__":
    main()
