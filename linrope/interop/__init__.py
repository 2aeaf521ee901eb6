"""To and from other programs: transformers, torch.export."""
