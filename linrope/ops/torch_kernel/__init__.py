"""Backend "chunked": the prefix-sum kernel in plain PyTorch, for any device."""
