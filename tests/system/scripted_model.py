"""A real model that says what a test wants, whatever it is asked: for programs with long prompts.

Its weights are an automaton: each token of the script points to the next one, and attention adds
nothing. So it computes prompts of any length as other models do, with templates and tools.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SIZE = 128  # of the residual: a direction for each token of the script
WINDOW = 64  # tokens that one looks at: over all 33,000 of a prompt it takes 5 s and adds nothing
# Its turn is how often the conversation has the result of a tool.
TEMPLATE = (
    "<|bos|>{% if tools %}<|system|><tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "</tools><|end|>{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
    "<|turn_{{ [results, LAST] | min }}|>{% endif %}"
)


def save_scripted_folder(folder: Path, turns: Sequence[str], max_model_len: int) -> Path:
    """Write a folder whose model says `turns[n]` after n results of tools, the last one again."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    chains = []
    for number, turn in enumerate(turns):
        begin = f"<|turn_{number}|>"
        tokenizer.add_special_tokens([begin])
        pieces = re.findall(r".{1,12}", turn, re.DOTALL)
        tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
        chains.append([tokenizer.token_to_id(piece) for piece in (begin, *pieces)])
    scripted = [token for chain in chains for token in chain]
    assert len(scripted) == len(set(scripted)) <= SIZE, "a piece of the script is in it twice"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = TEMPLATE.replace("LAST", str(len(turns) - 1))
    fast.save_pretrained(folder)
    _model(chains, tokenizer.get_vocab_size(), end, max_model_len).save_pretrained(folder)
    return folder


def _model(
    chains: Sequence[Sequence[int]], vocab_size: int, end: int, max_model_len: int
) -> MistralForCausalLM:
    config = MistralConfig(
        vocab_size=vocab_size,
        hidden_size=SIZE,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=max_model_len,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
        architectures=["MistralForCausalLM"],
    )
    model = MistralForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        direction = 0
        for chain in chains:
            for token, following in zip(chain, (*chain[1:], end), strict=True):
                model.model.embed_tokens.weight[token, direction] = 1.0
                model.lm_head.weight[following, direction] = 10.0
                direction += 1
    return model
