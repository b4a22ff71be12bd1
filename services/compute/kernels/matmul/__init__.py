"""Matrix products whose rows do not depend on their company, for `batch_invariant`."""
