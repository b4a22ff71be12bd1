"""Composes everything that a client demands of an answer's tokens into one `GrammarSpec`.

Runs in a process of the pool, within its limits. Grammars are only written here; compute compiles
them, with limits of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, ToolUse
from services.tokenizer.functions import Function, check_parameters
from services.tokenizer.jobs import refused
from services.tokenizer.lark import Fragment, grammar_of, one_of
from services.tokenizer.reasoning import ReasoningGrammar, ReasoningStage
from services.tokenizer.structural_tags import tag_grammar
from services.tokenizer.structures import structure_grammar
from services.tokenizer.tool_grammars import MARKED, TOOL_GRAMMARS, Dialect, watched_calls
from services.tokenizer.vocabulary import Vocabulary

MAX_CALLS = 32  # of one answer; a model in a loop would make them until its tokens are used up


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """How a model writes its answer to this prompt; formats are empty where it has none."""

    tool_format: str = ""
    reasoning_format: str = ""
    stage: ReasoningStage = "behind"
    template: str = ""
    several_calls: bool = True


def compose(
    rules: OutputRules,
    functions: Sequence[Function],
    format: TemplateFormat,
    vocabulary: Vocabulary,
    banned: tuple[tuple[int, ...], ...] = (),
) -> GrammarSpec | None:
    """Return the rules of the answer's tokens, None for no rules; Refused for impossible ones."""
    answer = _AnswerGrammar(rules, functions, format, vocabulary).fragment()
    if answer is None and not rules.allowed_token_ids and not banned:
        return None
    field = "tools" if rules.tools is not None else "thinking_budget"
    if rules.structure is not None and not _must_call(rules.tools):
        field = rules.structure.field
    grammar = "" if answer is None else grammar_of(answer)
    return GrammarSpec(grammar, rules.allowed_token_ids, banned, field)


def _must_call(tools: ToolUse | None) -> bool:
    return tools is not None and tools.choice != "auto"


@dataclass(frozen=True, slots=True)
class _AnswerGrammar:
    rules: OutputRules
    functions: Sequence[Function]
    format: TemplateFormat
    vocabulary: Vocabulary

    def fragment(self) -> Fragment | None:
        """Return the grammar of the whole answer; None where any text will do."""
        reasoning = None
        if self.format.reasoning_format:
            markers = REASONING_FORMATS[self.format.reasoning_format]
            budget = self.rules.thinking_budget
            reasoning = ReasoningGrammar(markers, self.vocabulary, self.format.stage, budget)
        answer = self._constrained()
        if answer is None:
            return self._free(reasoning)
        return answer if reasoning is None else reasoning.before(answer)

    def _free(self, reasoning: ReasoningGrammar | None) -> Fragment | None:
        """Return the grammar of free text whose calls or reasoning have rules."""
        tools, watched = self.rules.tools, None
        if tools is not None and self.functions and self.format.tool_format in MARKED:
            make = TOOL_GRAMMARS[self.format.tool_format]
            watched = watched_calls(
                tools, self.functions, self._dialect(), make, self._max_calls(tools)
            )
        if reasoning is None or reasoning.stage == "behind":
            return watched
        bounded = reasoning.before_free_text()
        if watched is None or (bounded is not None and reasoning.stage == "before"):
            return bounded  # free text cannot be kept from both reasoning and calls
        return reasoning.before(watched) if reasoning.stage == "inside" else watched

    def _constrained(self) -> Fragment | None:
        """Return the grammar of an answer that must be a call or a structure."""
        tools, structure = self.rules.tools, self.rules.structure
        if tools is not None and _must_call(tools):
            # A structure is that of the text beside the calls, and there is none.
            return self._calls(tools)
        if structure is None:
            return None
        if structure.kind == "structural_tag":
            fragment = tag_grammar(structure, self.vocabulary)
        else:
            fragment = structure_grammar(structure)
        if tools is not None and self.functions and self.format.tool_format:
            return one_of([self._calls(tools), fragment])
        return fragment

    def _calls(self, tools: ToolUse) -> Fragment:
        if not self.format.tool_format:
            raise refused(
                "this model's chat template has no format of tool calls that this server knows, "
                "so a call cannot be required; use tool_choice auto or none",
                "unsupported_value",
                "tool_choice",
            )
        functions = self.functions
        if tools.choice == "named":
            functions = [function for function in functions if function.name == tools.name]
            if not functions:
                raise refused(
                    f"tool_choice names the function {tools.name!r}, which is not among the tools",
                    "invalid_value",
                    "tool_choice",
                )
        if not functions:
            message = "tool_choice requires a call, but there are no tools"
            raise refused(message, field="tool_choice")
        check_parameters(functions)
        max_calls = 1 if tools.choice == "named" else self._max_calls(tools)
        return TOOL_GRAMMARS[self.format.tool_format](functions, self._dialect(), max_calls)

    def _max_calls(self, tools: ToolUse) -> int:
        return MAX_CALLS if tools.parallel and self.format.several_calls else 1

    def _dialect(self) -> Dialect:
        markers = TOOL_FORMATS[self.format.tool_format]
        return Dialect(markers, self.vocabulary, self.format.template)
