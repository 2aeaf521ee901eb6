"""How training and evaluation cut a corpus into batches."""
