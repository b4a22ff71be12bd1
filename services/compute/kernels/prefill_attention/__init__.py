"""Paged causal attention of prefill chunks over everything their sequences hold so far."""
