"""Position encodings beside RoPE: where a position enters a model other than by rotation."""
