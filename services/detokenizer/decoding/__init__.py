"""Incremental decoding: one Protocol, one file for each family of `tokenizers` decoders."""
