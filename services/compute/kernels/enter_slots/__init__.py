"""Newcomers: what sequences bring to their slots, from one upload to counts and tables."""
