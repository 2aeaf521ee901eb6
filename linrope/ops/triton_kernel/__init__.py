"""Backend "triton": fused kernels for NVIDIA GPUs."""
