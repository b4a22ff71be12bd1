"""Any other decoder of the `tokenizers` library: decode a short window and take the difference."""

from __future__ import annotations

from collections.abc import Iterable, Set

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING_IDS = 16  # the longest wait for a character: no script needs more than 4 byte tokens


class WindowDecoding:
    """Decoders whose rule for a token depends on its neighbours (WordPiece, Metaspace, …)."""

    def __init__(self, tokenizer: Tokenizer, special_ids: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._all = frozenset(tokenizer.get_vocab(True).values())
        self._taken = {frozenset[int](): self._all - special_ids}  # by what is shown

    def stream(
        self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> WindowStream:
        if not skip_special_tokens:
            return WindowStream(self._tokenizer, self._all)
        taken = self._taken.get(shown)
        if taken is None:
            taken = self._taken[shown] = self._taken[frozenset()] | shown
        return WindowStream(self._tokenizer, taken)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's text as the decoder gives it alone; none for what is no id."""
        if token_id not in self._all:
            return b""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


class WindowStream:
    """One stream: a context that has been shown, and ids behind it that have not.

    The window's first token is decoded as if it began a text, in both decodings of a difference,
    so that what the decoder does at a beginning cancels out. `_begun` are the prompt's last ids, if
    it ends with an unfinished character.
    """

    __slots__ = ("_begun", "_context", "_pending", "_taken", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, taken: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._taken = taken
        self._context: list[int] = []
        self._begun: list[int] = []
        self._pending: list[int] = []

    def follow(self, prompt_ids: Iterable[int]) -> str:
        text = self.push(prompt_ids)
        self._begun, self._pending = self._pending, []
        settled = self._decode(self._context + self._begun).rstrip(REPLACEMENT)
        return text + settled[len(self._decode(self._context)) :]

    def push(self, ids: Iterable[int]) -> str:
        parts = []
        for token_id in ids:
            if token_id in self._taken:  # others are no text, and would push the context out
                self._pending.append(token_id)
                parts.append(self._take(final=len(self._pending) > MAX_PENDING_IDS))
        return "".join(parts)

    def flush(self) -> str:
        """Return what the waiting ids decode to as they are."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        if not self._pending:
            return ""
        shown = self._decode(self._context + self._begun)
        text = self._decode(self._context + self._begun + self._pending)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        if self._begun and not text.startswith(shown):  # its last character is another now
            shown = shown.rstrip(REPLACEMENT)
        elif self._begun:
            self._begun = []
            return self._take(final)
        self._context = (self._context + self._begun + self._pending)[-len(self._pending) - 4 :]
        self._begun, self._pending = [], []
        return text[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
