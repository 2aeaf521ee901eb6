"""The operator: `linear_attention`, its backends, and the state that connects its calls. It knows tensors only."""
