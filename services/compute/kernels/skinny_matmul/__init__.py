"""Linear maps of 2 to 64 rows on tensor cores, bound by reading the weights."""
