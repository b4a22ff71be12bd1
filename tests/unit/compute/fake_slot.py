"""A slot of the fake device."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.compute.step import DEVICE_TOKEN, SlotDelta
from tests.unit.compute.fake_texts import draft_after, extend, next_token


@dataclass
class Slot:
    """What the device keeps of one slot."""

    delta: SlotDelta
    pages: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and index
    last: int | None = None  # the token that the next decode row takes
    length: int = -1  # its position
    index: int = -1  # of its output
    outputs: list[int] = field(default_factory=list)
    num_pooled: int = 0
    valid: list[int] = field(default_factory=list)  # of the step, if drafts are right
    num_offered: int = 0

    def draft(self, prefix: int, given: int) -> int | None:
        """The next draft behind a prefix, if none is given; while drafts are right, the token there
        is valid. One that is given to a sequence without guesses is."""
        number, delta = self.num_offered, self.delta
        outputs = [*self.outputs, *self.valid]
        token = next_token(prefix, self.index + number, delta.sampling, delta, outputs)
        draft: int | None
        if given == DEVICE_TOKEN:
            draft = draft_after(prefix, token, number)
        else:
            draft = given
            if not delta.drafts:
                assert given == token or prefix < 0, "a forced token is another one"
                token = given
        if draft is not None:
            if draft == token and len(self.valid) == number:
                self.valid.append(token)
            self.num_offered += 1
        return draft

    def guesses(self, prefix: int, most: int) -> list[int]:
        """What it would draft behind a prefix."""
        said: list[int] = []
        while len(said) < most:
            index, outputs = self.index + len(said), [*self.outputs, *said]
            token = next_token(prefix, index, self.delta.sampling, self.delta, outputs)
            draft = draft_after(prefix, token, len(said))
            if draft is None:
                break
            said.append(draft)
            prefix = extend(prefix, draft)
        return said

    def take_index(self, index: int) -> None:
        """The plan's output index is the slot's, or above it where drafts may have been wrong."""
        known = self.index >= 0
        is_right = self.index <= index if self.delta.drafts else self.index == index
        assert is_right or not known, "the host is wrong about a slot's output index"
        self.index = self.index if known else index
