"""Random tests with fixed seeds: each found a defect once, and would find it again."""
