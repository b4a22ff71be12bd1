"""Composes all constraints that a request puts on its answer into one `GrammarSpec`.

Runs in a process of the pool, within its limits. Grammars are only written here; compute compiles
them, with limits of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.chat_formats import REASONING_FORMATS, ReasoningMarkers
from common.messages.sampling import GrammarSpec
from common.messages.tokenize import OutputRules, ToolUse
from services.tokenizer.functions import Function, check_parameters, functions_of
from services.tokenizer.jobs import ReasoningStage, Refused, TemplateFormat
from services.tokenizer.lark import (
    FREE_TEXT,
    Fragment,
    Vocabulary,
    escaped,
    grammar_of,
    in_order,
    literal,
    one_of,
    optional,
)
from services.tokenizer.structures import structure_grammar
from services.tokenizer.tool_grammars import call_grammar, watched_calls

MAX_CALLS = 32  # of one answer; a model in a loop would make them until its tokens are used up
_BREAKS = '("\\n" | "\\n\\n")?'  # what models write between their reasoning and the answer
_NO_THOUGHTS = literal("\n\n")  # templates write an empty reasoning in this way


def compose(
    rules: OutputRules, tools: list[Any], format: TemplateFormat, vocabulary: Vocabulary
) -> GrammarSpec | None:
    """Return the rules of the answer's tokens, None for no rules; Refused for impossible ones."""
    banned = vocabulary.bad_word_sequences(rules.bad_words)
    functions = [] if rules.tools is None else functions_of(tools, rules.tools.inputs)
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
        reasoning, reasoning_format = None, self.format.reasoning_format
        if reasoning_format and self.format.stage != "behind":
            markers, budget = REASONING_FORMATS[reasoning_format], self.rules.thinking_budget
            reasoning = ReasoningGrammar(markers, self.vocabulary, self.format.stage, budget)
        answer = self._constrained(reasoning)
        if answer is None:
            return self._free(reasoning)
        return answer if reasoning is None else reasoning.before(answer)

    def _free(self, reasoning: ReasoningGrammar | None) -> Fragment | None:
        """Return the grammar of free text whose calls or reasoning have rules."""
        tools, watched = self.rules.tools, None
        if tools is not None and self.format.tool_format:
            if not tools.parallel or any(function.strict for function in self.functions):
                max_calls = self._max_calls(tools)
                watched = watched_calls(self.functions, self.format, self.vocabulary, max_calls)
        if reasoning is None:
            return watched
        bounded = reasoning.before_free_text()
        if watched is None or (bounded is not None and reasoning.stage == "before"):
            return bounded  # free text cannot be kept from both reasoning and calls
        return reasoning.before(watched) if reasoning.stage == "inside" else watched

    def _constrained(self, reasoning: ReasoningGrammar | None) -> Fragment | None:
        """Return the grammar of an answer that must be a call or a structure."""
        tools, structure = self.rules.tools, self.rules.structure
        if tools is not None and _must_call(tools):
            # A structure is that of the text beside the calls, and there is none.
            return self._calls(tools)
        if structure is None:
            return None
        fragment = structure_grammar(structure, self.vocabulary)
        if reasoning is not None:
            fragment = in_order(reasoning.answer_begin, fragment)
        if tools is not None and self.format.tool_format:
            return one_of([self._calls(tools), fragment])
        return fragment

    def _calls(self, tools: ToolUse) -> Fragment:
        if not self.format.tool_format:
            raise Refused(
                "this model's chat template has no format of tool calls that this server knows, "
                "so a call cannot be required; use tool_choice auto or none",
                "unsupported_value",
                "tool_choice",
            )
        functions, max_calls = self.functions, self._max_calls(tools)
        if tools.choice == "named":
            functions = [function for function in functions if function.name == tools.name]
            max_calls = 1
        check_parameters(functions)
        return call_grammar(functions, self.format, self.vocabulary, max_calls)

    def _max_calls(self, tools: ToolUse) -> int:
        return MAX_CALLS if tools.parallel and self.format.several_calls else 1


@dataclass(frozen=True, slots=True)
class ReasoningGrammar:
    """The reasoning that may precede an answer: its tags, and the most tokens between them.

    The stage is "inside" or "before"; a budget of -1 is any number of tokens.
    """

    markers: ReasoningMarkers
    vocabulary: Vocabulary
    stage: ReasoningStage
    budget: int = -1

    def before(self, answer: Fragment) -> Fragment:
        """Return the grammar of an answer with the reasoning that may come before it."""
        between = self.vocabulary.spelled(self.markers.next) if self.markers.next else _BREAKS
        if self.stage == "inside":
            return in_order(self._to_end(), between, answer)
        if self.budget == 0:
            return answer
        return in_order(optional(in_order(self._begin, self._to_end(), between)), answer)

    @property
    def answer_begin(self) -> str:
        """What the text of an answer begins with, an empty expression in most formats."""
        return self.vocabulary.spelled(self.markers.answer) if self.markers.answer else ""

    def before_free_text(self) -> Fragment | None:
        """Return the grammar of bounded reasoning and then any text; None without a bound."""
        if self.budget < 0:
            return None
        if self.stage == "inside":
            return in_order(self._to_end(), FREE_TEXT)
        if self.markers.answer:  # where reasoning is no part of the text, text alone has none
            thoughtful = in_order(self._begin, self._to_end(), FREE_TEXT)
            calls = self.vocabulary.spelled(self.markers.calls)
            unthoughtful = Fragment(f"({self.answer_begin} | {calls}) {FREE_TEXT}")
            return unthoughtful if self.budget == 0 else one_of([thoughtful, unthoughtful])
        if self.budget == 0:  # as templates write it when thinking is off
            end = self.vocabulary.marker(self.markers.end)
            return in_order(self._begin, _NO_THOUGHTS, end, _NO_THOUGHTS, FREE_TEXT)
        thoughtful = in_order(self._begin, self._to_end(), FREE_TEXT)
        return optional(one_of([thoughtful, Fragment(self._unthoughtful())]))

    @property
    def _begin(self) -> str:
        return self.vocabulary.spelled(self.markers.begin)

    def _to_end(self) -> Fragment:
        """Return the thoughts and the end tag, with the bound where there is one."""
        vocabulary, end = self.vocabulary, self.markers.end
        token_id = vocabulary.token_of(end)
        if self.budget == 0:
            return Fragment(vocabulary.marker(end))
        if self.budget < 0:
            # Lazy: the first tag ends the reasoning, in however many tokens, as it does for the
            # parsers of the text.
            rules = [f"thoughts[lazy]: /(.|\\n)*{escaped(end)}/"]
            if not vocabulary.is_special(end):
                return Fragment("thoughts", tuple(rules))
            rules.append("THOUGHT: /(.|\\n)*/")
            thoughts = f"(thoughts | THOUGHT {vocabulary.marker(end)})"
            if self.stage == "inside" and vocabulary.is_special(self.markers.begin):
                # Some models repeat the tag that the prompt ends with.
                thoughts = f"({self._begin})? {thoughts}"
            return Fragment(thoughts, tuple(rules))
        if token_id is not None:
            thought = vocabulary.ordinary(without=token_id)
            return Fragment(f"{thought}{{0,{self.budget}}} <[{token_id}]>")
        # A grammar counts tokens only where it need not look inside them, and this tag takes
        # several. Without its first character no thought can begin the tag; then it can count.
        thought = vocabulary.ordinary(lacking=end[0])
        return Fragment(f"{thought}{{0,{self.budget}}} {literal(end)}")

    def _unthoughtful(self) -> str:
        begin = self.markers.begin
        token_id = self.vocabulary.token_of(begin)
        if token_id is not None:
            return f"{self.vocabulary.any(without=token_id)}+"
        return f"{self.vocabulary.ordinary(lacking=begin[0])} {FREE_TEXT}"


def stage_of(prompt_end: str, markers: ReasoningMarkers, continued: str | None) -> ReasoningStage:
    """Return where a rendered prompt leaves the model.

    `continued` is the text of the final message, if the model continues it.
    """
    if continued is not None and markers.begin in continued:
        inside = continued.rfind(markers.begin) > continued.rfind(markers.end)
        return "inside" if inside else "behind"
    end = prompt_end.rstrip()
    if end.endswith(markers.begin):
        return "inside"
    if end.endswith(markers.end) or continued:
        return "behind"
    return "before"
