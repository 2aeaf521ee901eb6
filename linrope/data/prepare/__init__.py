"""Text tokenized once, into a folder to train from."""
