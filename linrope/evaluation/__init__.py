"""What is measured of trained models: loss by position, longer rows, recall; and their tables and pictures."""
