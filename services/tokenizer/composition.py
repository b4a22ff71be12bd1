"""Composes all that a client wants of an answer's tokens into one `Guidance`.

Runs in a process of the pool, within its limits. Grammars are only written here; compute compiles
them, with limits of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from common.messages.guidance import Guidance
from common.messages.tokenize import OutputRules, ToolUse
from services.tokenizer.functions import Function
from services.tokenizer.lark import Fragment, grammar_of, one_of
from services.tokenizer.refusal import refused
from services.tokenizer.schema_check import check_parameters
from services.tokenizer.structural_tags import tag_grammar
from services.tokenizer.structures import structure_grammar
from services.tokenizer.thinking import Stage, Thinking
from services.tokenizer.tool_grammars.protocol import Dialect, ToolGrammar
from services.tokenizer.tool_grammars.registry import TOOL_GRAMMARS
from services.tokenizer.vocabulary import Vocabulary
from services.tokenizer.watched_calls import MARKED, watched_calls

MAX_CALLS = 32  # of one answer; a model in a loop would make them until its tokens are used up


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model writes its answer to this prompt; formats are empty where it has none."""

    tool_format: str = ""
    reasoning_format: str = ""
    stage: Stage = "behind"
    template: str = ""
    makes_several_calls: bool = True


def compose(
    rules: OutputRules,
    functions: Sequence[Function],
    speech: Speech,
    vocabulary: Vocabulary,
    banned: tuple[tuple[int, ...], ...] = (),
) -> Guidance | None:
    """Return what the answer's tokens must obey; None for nothing. Refused for what cannot be."""
    grammar = _grammar(rules, functions, speech, vocabulary)
    if not grammar and not rules.allowed_token_ids and not banned:
        return None
    field = "tools" if rules.tools is not None else "thinking_budget"
    if rules.structure is not None and not _must_call(rules.tools):
        field = rules.structure.field
    return Guidance(grammar, rules.allowed_token_ids, banned, field)


def _grammar(
    rules: OutputRules, functions: Sequence[Function], speech: Speech, vocabulary: Vocabulary
) -> str:
    thinking = None
    if speech.reasoning_format:
        markers = REASONING_FORMATS[speech.reasoning_format]
        thinking = Thinking(markers, vocabulary, speech.stage, rules.thinking_budget)
    answer = _answer(rules, functions, speech, vocabulary)
    if answer is None:
        answer = _free_answer(rules, functions, speech, thinking, vocabulary)
    elif thinking is not None:
        answer = thinking.before(answer)
    return "" if answer is None else grammar_of(answer)


def _free_answer(
    rules: OutputRules,
    functions: Sequence[Function],
    speech: Speech,
    thinking: Thinking | None,
    vocabulary: Vocabulary,
) -> Fragment | None:
    tools, watched = rules.tools, None
    if tools is not None and functions and speech.tool_format in MARKED:
        several = tools.parallel and speech.makes_several_calls
        make, dialect = _format(speech, vocabulary)
        max_calls = MAX_CALLS if several else 1
        watched = watched_calls(tools, functions, dialect, make, max_calls)
    if thinking is None or thinking.stage == "behind":
        return watched
    bounded = thinking.before_free_text()
    if watched is None or (bounded is not None and thinking.stage == "before"):
        return bounded  # free text cannot be kept from both reasoning and calls
    return thinking.before(watched) if thinking.stage == "inside" else watched


def _answer(
    rules: OutputRules, functions: Sequence[Function], speech: Speech, vocabulary: Vocabulary
) -> Fragment | None:
    tools, structure = rules.tools, rules.structure
    if _must_call(tools) and tools is not None:
        # A structure is that of the text beside the calls, and there is none.
        return _calls(tools, functions, speech, vocabulary)
    if structure is None:
        return None
    if structure.kind == "structural_tag":
        fragment = tag_grammar(structure, vocabulary)
    else:
        fragment = structure_grammar(structure)
    if tools is not None and functions and speech.tool_format:
        return one_of([_calls(tools, functions, speech, vocabulary), fragment])
    return fragment


def _must_call(tools: ToolUse | None) -> bool:
    return tools is not None and tools.choice != "auto"


def _calls(
    tools: ToolUse, functions: Sequence[Function], speech: Speech, vocabulary: Vocabulary
) -> Fragment:
    if not speech.tool_format:
        raise refused(
            "this model's chat template has no format of tool calls that this server knows, so a "
            "call cannot be required; use tool_choice auto or none",
            "unsupported_value",
            "tool_choice",
        )
    if tools.choice == "named":
        functions = [function for function in functions if function.name == tools.name]
        if not functions:
            raise refused(
                f"tool_choice names the function {tools.name!r}, which is not among the tools",
                "invalid_value",
                "tool_choice",
            )
    if not functions:
        raise refused("tool_choice requires a call, but there are no tools", field="tool_choice")
    check_parameters(functions)
    several = tools.parallel and tools.choice != "named" and speech.makes_several_calls
    make, dialect = _format(speech, vocabulary)
    return make(functions, dialect, MAX_CALLS if several else 1)


def _format(speech: Speech, vocabulary: Vocabulary) -> tuple[ToolGrammar, Dialect]:
    dialect = Dialect(TOOL_FORMATS[speech.tool_format], vocabulary, speech.template)
    return TOOL_GRAMMARS[speech.tool_format], dialect
