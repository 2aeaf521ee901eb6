"""Recall tasks: rows that ask for what they told earlier."""
