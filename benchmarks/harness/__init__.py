"""What benchmarks share: timing, memory, tables, pictures."""
