"""Step input: from one packed upload to everything that a step's kernels read."""
