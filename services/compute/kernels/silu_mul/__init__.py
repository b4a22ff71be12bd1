"""The gate of the MLP: silu(gate) * up."""
