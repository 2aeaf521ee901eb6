"""Text and tokens: tokenizers, corpora, batches, recall tasks, preparation."""
