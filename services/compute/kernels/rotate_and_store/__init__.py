"""Head norms, rotary embedding and the write into the KV cache, between qkv and attention."""
