"""Helpers that know nothing of models: files, formatting, checks of options."""
