"""Position encodings beside RoPE."""
