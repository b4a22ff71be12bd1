"""What drafts are from, by number: the text itself, the client's prediction, a grammar that forces
them, a small model, past answers, or heads that see the model's hidden states."""

from __future__ import annotations

from common.speculative import HEADS

NGRAM, PREDICTION, GRAMMAR, DRAFT_MODEL, SUFFIX, EAGLE, EAGLE3, MEDUSA, MTP = range(9)
DRAFTERS = ("ngram", "prediction", "grammar", "draft_model", "suffix", *HEADS)
