"""Paged attention of rows with one query each: planned once a step, launched once a layer."""
