"""Linear maps of one row: bound by reading the weights, so fused with their neighbours."""
