"""Which format a chat template speaks is read off its source."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from common.chat_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    opens_reasoning,
    reasoning_format_of,
    special_ids,
    tool_format_of,
)

TEMPLATES = Path(__file__).parents[1] / "tokenizer" / "templates"

# Lines in the shape of those that tell the formats of well-known models.
TOOL_SIGNS = {
    "Hermes 3": ("{{- '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}", "hermes"),
    "Qwen 3": ('{{- \'\\n<tool_call>\\n{"name": "\' }}', "hermes"),
    "Qwen3 Coder": ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
    "GLM 4.5": ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm"),
    "MiniMax M2": ("{%- set begin = '<minimax:tool_call>' -%}", "minimax"),
    "Kimi K2": (
        "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ args }}",
        "kimi_k2",
    ),
    "Kimi K2 without calls": (
        "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' }}{{ tools | tojson }}",
        "kimi_k2",
    ),
    "Kimi VL": ("{{ '<|im_system|>system<|im_middle|>' }}", ""),
    "gpt-oss": ('"<|start|>assistant<|channel|>final<|message|>" + message.content', "harmony"),
    "Llama 3.1's own functions": ("<function=name>{json}</function>", ""),
    "unknown tags inside of Hermes's": ("<tool_call><function=f>{json}</function>", ""),
    "Llama 3.1": (
        '{{ \'<|python_tag|>\' }} {"name": function name, "parameters": dictionary of }',
        "llama_json",
    ),
    "Llama 3.3": ("message.role == 'ipython' {{- '\"parameters\": ' }}", "llama_json"),
    "Llama 4": ("'<|header_start|>ipython<|header_end|>' {{- '\"parameters\": ' }}", "llama_json"),
    "Llama 3.2 pythonic": ("ipython: [func_name1(params_name1=value1)]", "llama_pythonic"),
    "Llama 4 pythonic": ("ipython {{- tool_call.name + '(' -}}", "llama_pythonic"),
    "Mistral 7B v0.3": ('{{- "[TOOL_CALLS] [" }}', "mistral"),
    "Mistral Small 3.2": ("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", "mistral"),
    "DeepSeek V3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
    "Granite 3": ("<|tool_call|>", ""),
    "a schema with parameters": ('{{- "parameters": tool.parameters }}', ""),
}
REASONING_SIGNS = {
    "Qwen 3": ("{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}", "think"),
    "QwQ": ("split('</think>') {{- '<|im_start|>assistant\\n<think>\\n' }}", "deepseek_r1"),
    "R1 distilled": ("{{'<｜Assistant｜><think>\\\\n'}}", "deepseek_r1"),
    "R1 at first": ("content.split('</think>')[-1] {{'<｜Assistant｜>'}}", "think"),
    "V3.1": ("{%- if thinking %}{{'<think>'}}{%- else %}{{'</think>'}}", "think"),
    "Magistral": ("{{- '[THINK]' + block.thinking + '[/THINK]' }}", "magistral"),
    "Granite 3.2": ("Here is my thought process: … Here is my response:", "granite"),
    "EXAONE Deep": ("'<thought>\\n'", "exaone"),
    "Seed OSS": ("<seed:think>", "seed"),
    "Kimi VL": ("◁/think▷", "kimi"),
    "GLM 4.5": ("{{ '\\n<think></think>' if not enable_thinking else '' }}", "think"),
    "MiniMax M2": ("{{ ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}", "think"),
    "gpt-oss": ('"<|start|>assistant<|channel|>final<|message|>" + message.content', "harmony"),
    "Command A": ("<|START_THINKING|>", "cohere"),
    "Phi 3": ("{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}", ""),
    "no reasoning": ("I think, therefore <b>I am</b>", ""),
}


@pytest.mark.parametrize("name", TOOL_SIGNS)
def test_the_format_of_tool_calls_is_read_off_the_template(name: str) -> None:
    source, expected = TOOL_SIGNS[name]
    assert tool_format_of(source) == expected


@pytest.mark.parametrize("name", REASONING_SIGNS)
def test_the_format_of_reasoning_is_read_off_the_template(name: str) -> None:
    source, expected = REASONING_SIGNS[name]
    assert reasoning_format_of(source) == expected


@pytest.mark.parametrize(
    ("name", "tool_format", "reasoning_format"),
    [
        ("chatml", "", ""),
        ("command_r.tool_use", "", ""),
        ("deepseek_v3_fenced", "deepseek", "deepseek_r1"),
        ("deepseek_v31_switch", "deepseek", "think"),
        ("gemma", "", ""),
        ("glm_xml_tools", "glm", "think"),
        ("granite_documents", "", ""),
        ("harmony_macros", "harmony", "harmony"),
        ("hermes_tools", "hermes", ""),
        ("kimi_k2_ids", "kimi_k2", ""),
        ("llama31_tools", "llama_json", ""),
        ("llama32_pythonic", "llama_pythonic", ""),
        ("magistral_v13", "mistral", "magistral"),
        ("minimax_m2_thinking", "minimax", "think"),
        ("mistral_v3_tools", "mistral", ""),
        ("qwen25_tools", "hermes", ""),
        ("qwen3_coder_tools", "qwen3_coder", ""),
        ("qwen3_thinking", "hermes", "think"),
    ],
)
def test_whole_templates_are_told_apart(name: str, tool_format: str, reasoning_format: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    assert tool_format_of(source) == tool_format
    assert reasoning_format_of(source) == reasoning_format


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        ("{%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}", True),
        ("{{ '<|Assistant|><think>\\n' }}", True),
        ("{%- if not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}", False),
        ("{{- message.content.split('</think>')[-1] }}", False),
    ],
)
def test_a_template_whose_prompts_open_the_reasoning_is_known(template: str, opens: bool) -> None:
    assert opens_reasoning(template) is opens


def test_the_markers_of_a_format_are_those_it_has() -> None:
    assert TOOL_FORMATS["hermes"].all == ("<tool_call>", "</tool_call>")
    assert TOOL_FORMATS["llama_json"].all == ("<|python_tag|>",)
    assert len(TOOL_FORMATS["deepseek"].all) == 5
    assert REASONING_FORMATS["think"] == REASONING_FORMATS["deepseek_r1"]


def test_special_tokens_among_the_markers_are_found_by_id() -> None:
    added = {
        7: AddedToken("[TOOL_CALLS]", special=True),
        8: AddedToken("[ARGS]", special=False),
        9: AddedToken("[INST]", special=True),
    }
    assert special_ids(TOOL_FORMATS["mistral"].all, added) == {"[TOOL_CALLS]": 7}
