"""Residual addition and RMS normalisation in one pass over the row."""
