"""Speed and memory of the operator and of whole models."""
