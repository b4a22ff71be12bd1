"""How an answer to a rendered prompt will look: where the prompt leaves a model that can reason."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from common.errors import ModelError
from common.messages.tokenize import ChatPrompt
from common.tokenizer_folder import read_folder
from services.tokenizer.chat_renderer import ChatRenderer
from services.tokenizer.jobs import EncoderSettings, ReasoningStage
from tests.unit.tokenizer.vocabularies import byte_level, write_folder

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
OPENED = TURNS + "{%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}"
LEFT_TO_THE_MODEL = TURNS + "{%- if not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}"


@pytest.mark.parametrize(
    ("template", "enable_thinking", "stage"),
    [
        (OPENED, True, "inside"),
        (OPENED, False, "behind"),
        (LEFT_TO_THE_MODEL, True, "before"),
        (LEFT_TO_THE_MODEL, False, "behind"),
    ],
)
def test_a_model_whose_prompts_open_its_reasoning_does_not_reason_unless_they_do(
    tmp_path: Path, template: str, enable_thinking: bool, stage: ReasoningStage
) -> None:
    write_folder(tmp_path, byte_level(), chat_template=template)
    settings = EncoderSettings(str(tmp_path), 4000, 5.0, 64, template_kwargs=("enable_thinking",))
    chats = ChatRenderer(read_folder(tmp_path), settings, nullcontext)
    prompt = ChatPrompt(
        b'[{"role": "user", "content": "Hi"}]',
        template_kwargs_json=json.dumps({"enable_thinking": enable_thinking}).encode(),
    )
    assert chats.render(prompt, 0.0).answer_format.stage == stage


def test_a_template_that_the_settings_name_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), chat_template="{{ messages[0].content }}")
    file = tmp_path / "shout.jinja"
    file.write_text("{{ messages[0].content | upper }}")
    settings = EncoderSettings(str(tmp_path), 4000, 5.0, 64, chat_template=str(file))
    chats = ChatRenderer(read_folder(tmp_path, str(file)), settings, nullcontext)
    assert chats.render(ChatPrompt(b'[{"role": "user", "content": "Hi"}]'), 0.0).text == "HI"


def test_a_template_that_the_settings_name_has_to_be_valid(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level())
    file = tmp_path / "open.jinja"
    file.write_text("{% for message in messages %}")
    settings = EncoderSettings(str(tmp_path), 4000, 5.0, 64, chat_template=str(file))
    with pytest.raises(ModelError, match=r"open\.jinja: the chat template does not compile"):
        ChatRenderer(read_folder(tmp_path, str(file)), settings, nullcontext)
    with pytest.raises(ModelError, match=r"absent\.jinja cannot be read"):
        read_folder(tmp_path, str(tmp_path / "absent.jinja"))


@pytest.mark.parametrize("is_kimi", [True, False])
def test_kimi_reads_the_keys_of_tools_in_alphabetical_order(tmp_path: Path, is_kimi: bool) -> None:
    declared = "<|im_system|>tool_declare<|im_middle|>" if is_kimi else ""
    template = "{% if tools %}" + declared + "{{ tools | tojson }}{% endif %}"
    write_folder(tmp_path, byte_level(), chat_template=template)
    settings = EncoderSettings(str(tmp_path), 4000, 5.0, 64)
    chats = ChatRenderer(read_folder(tmp_path), settings, nullcontext)
    function = {"name": "look", "parameters": {"properties": {"b": {}, "a": {}}}}
    tools = [{"type": "function", "function": function}]
    prompt = ChatPrompt(
        b'[{"role": "user", "content": "Hi"}]', tools_json=json.dumps(tools).encode()
    )
    rendered = chats.render(prompt, 0.0)
    assert rendered.text == declared + json.dumps(tools, sort_keys=is_kimi)
    assert rendered.tools == tools
