"""What happens around training steps: one callback a file."""
