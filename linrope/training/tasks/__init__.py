"""The tasks that can be trained: each a LightningModule with its loss and its metrics."""
