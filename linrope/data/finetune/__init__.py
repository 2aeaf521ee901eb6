"""Labelled data for fine-tuning: readers of file formats, and examples as tokens."""
