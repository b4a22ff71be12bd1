"""Trains the tokenizer and turns conversations into tokens; knows no skill and no model."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.demo.training.conversation import Conversation

VOCAB_SIZE = 3072
PAD, BOS, END, SYSTEM, USER, ASSISTANT = range(6)
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
ROLE_IDS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
MAX_POSITIONS = 2048

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A",
        pair="<|bos|> $A $B:1",
        special_tokens=[("<|bos|>", BOS)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer and its settings as Hugging Face libraries expect them."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "extra_special_tokens": [SPECIAL_TOKENS[role] for role in (SYSTEM, USER, ASSISTANT)],
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def encode(
    tokenizer: Tokenizer, conversations: list[Conversation]
) -> list[tuple[list[int], list[bool]]]:
    """Encode as the chat template renders, and mark the tokens the model must produce."""
    chats = [conversation.messages() for conversation in conversations]
    contents = [message["content"] for chat in chats for message in chat]
    encodings = iter(tokenizer.encode_batch(contents, add_special_tokens=False))
    return [
        assemble([(message["role"], next(encodings).ids) for message in chat]) for chat in chats
    ]


def assemble(chat: list[tuple[str, list[int]]]) -> tuple[list[int], list[bool]]:
    """Join encoded messages; only the assistant's words and their end are to be learned."""
    ids, learned = [BOS], [False]
    for role, content in chat:
        ids += [ROLE_IDS[role], *content, END]
        learned += [False] + [role == "assistant"] * (len(content) + 1)
    return ids, learned
