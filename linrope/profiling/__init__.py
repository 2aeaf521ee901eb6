"""What a model costs and how it does inside: FLOPs, memory estimates, hooks on layers."""
