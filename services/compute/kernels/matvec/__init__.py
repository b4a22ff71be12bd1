"""Linear maps of a few rows: bound by reading the weights, so fused with their neighbours."""
