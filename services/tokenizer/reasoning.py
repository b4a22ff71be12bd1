"""The grammar of the reasoning that may precede an answer, and its bound in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from common.chat_formats import ReasoningMarkers
from services.tokenizer.lark import FREE_TEXT, Fragment, escaped, in_order, literal, optional
from services.tokenizer.vocabulary import Vocabulary

# Where a prompt leaves the model: inside its reasoning, before it, or behind it.
ReasoningStage: TypeAlias = Literal["inside", "before", "behind"]

_BREAKS = '("\\n" | "\\n\\n")?'  # what models write between their reasoning and the answer
_NO_THOUGHTS = literal("\n\n")  # templates write an empty reasoning in this way


@dataclass(frozen=True, slots=True)
class ReasoningGrammar:
    """One model's reasoning: its tags, and the most tokens between them (-1: any number)."""

    markers: ReasoningMarkers
    vocabulary: Vocabulary
    stage: ReasoningStage
    budget: int = -1

    def before(self, answer: Fragment) -> Fragment:
        """Return the grammar of an answer with the reasoning that may come before it."""
        if self.stage == "behind" or (self.stage == "before" and self.budget == 0):
            return answer
        thoughts = in_order(self._to_end(), Fragment(_BREAKS))
        if self.stage == "before":
            thoughts = optional(in_order(self._begin(), thoughts))
        return in_order(thoughts, answer)

    def before_free_text(self) -> Fragment | None:
        """Return the grammar of bounded reasoning and then any text; None without a bound."""
        if self.budget < 0 or self.stage == "behind":
            return None
        if self.stage == "inside":
            return in_order(self._to_end(), Fragment(FREE_TEXT))
        if self.budget == 0:  # as templates write it when thinking is off
            end = self.vocabulary.marker(self.markers.end)
            thoughts = f"{_NO_THOUGHTS} {end} {_NO_THOUGHTS}"
            return in_order(self._begin(), Fragment(f"{thoughts} {FREE_TEXT}"))
        thoughtful = in_order(self._begin(), self._to_end(), Fragment(FREE_TEXT))
        return Fragment(f"({thoughtful.expression} | {self._unthoughtful()})?", thoughtful.rules)

    def _begin(self) -> Fragment:
        return Fragment(self.vocabulary.marker(self.markers.begin))

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
                thoughts = f"({vocabulary.marker(self.markers.begin)})? {thoughts}"
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
