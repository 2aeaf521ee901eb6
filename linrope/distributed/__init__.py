"""Sequences that several devices share, on torch.distributed: each holds a slice of the tokens of every row."""
