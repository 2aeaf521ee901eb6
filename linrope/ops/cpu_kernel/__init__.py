"""Backend "cpu": the compiled kernel for processors."""
