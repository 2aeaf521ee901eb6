"""Sequence parallelism: bytes sent (counted), time on this machine (measured), time on many GPUs (modelled)."""
