"""Model folders made on the spot: random weights, a byte-level tokenizer and a chat template.

Small ones serve the system tests, larger ones the figures that need a model of some size.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS_ID, END_ID = 0, 1
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL_VOCABULARY = 512
MAX_VOCABULARY = 4096  # what trains in seconds; a model may have more ids than that
CORPUS = (
    "A train leaves the station in the morning and comes back in the evening.",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "One, two, three, four, five, six, seven, eight, nine and ten.",
    "Über den Wolken; 東京は日本の首都です。 Ça va? 🙂",
    "def main() -> int:\n    return 0\n",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-shaped model; the defaults compute a step in a millisecond or two."""

    vocab_size: int = SMALL_VOCABULARY
    hidden_size: int = 64
    intermediate_size: int = 160
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    max_model_len: int = 2048
    dtype: str = "float32"
    initializer_range: float = 0.3  # sharp enough that rounding does not decide a token


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of this size at most; every text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(vocab_size), trainer)
    return tokenizer


def _corpus(vocab_size: int) -> Iterator[str]:
    """Yield sentences, and invented words where a vocabulary needs more than they have."""
    yield from CORPUS
    if vocab_size > SMALL_VOCABULARY:
        dice = random.Random(7)
        syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
        for _ in range(2 * vocab_size):
            word = "".join(dice.choices(syllables, k=dice.randrange(2, 5)))
            yield f"the {word} and {word.title()}"


def save_folder(folder: Path, shape: ModelShape, *, with_weights: bool = True) -> Path:
    """Write a Hugging Face folder; without weights it serves the `sim` device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_model_len,
        initializer_range=shape.initializer_range,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        dtype=shape.dtype,
        architectures=["LlamaForCausalLM"],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(min(shape.vocab_size, MAX_VOCABULARY)),
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[END_ID],
        pad_token=SPECIAL_TOKENS[END_ID],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    if with_weights:
        torch.manual_seed(7)
        LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder
