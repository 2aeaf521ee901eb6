"""Callbacks of training, one in each file."""
