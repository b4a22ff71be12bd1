"""Small vocabularies of every kind, trained in a moment, and model folders around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ["<s>", "</s>", "<unk>", "<pad>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog looks up.",
    "What is the capital of France? The capital of France is Paris.",
    "Größe, naïve, façade: words that leave ASCII.   Three spaces, then a tab:\t.",
    "def add(a: int, b: int) -> int:\n    return a + b  # 12345 + 67890\n",
    "日本語の文章と、中文句子。 Русский текст. 🎉🚀 emoji",
    '{"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2, 3]}}',
] * 4


def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen, with a bos token by the post-processor."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _bos_first()
    return tokenizer


def metaspace() -> Tokenizer:
    """BPE over ▁ with byte fallback, as sentencepiece makes it for Llama 2 and Mistral."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    # What training lists as added tokens are plain byte tokens in a real model.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [
        token for token in described["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = _bos_first()
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece as in BERT, with a normalizer that changes the text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram over ▁, as in T5 and XLM-R; no post-processor."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "unigram": unigram,
}

NAMED_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


def write_folder(path: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    """Write a model folder with this tokenizer; `settings` go into tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED_TOKENS, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    model = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 256}
    (path / "config.json").write_text(json.dumps(model), "utf-8")
    return path


def _bos_first() -> Any:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
