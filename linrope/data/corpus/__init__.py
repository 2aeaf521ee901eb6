"""Corpora: what `data.path` names, as one sequence of tokens."""
