"""To and from other programs: transformers, torch.export, ONNX."""

from linrope.interop.llama import load_llama
from linrope.interop.roformer import export_roformer, load_roformer

__all__ = ["export_roformer", "load_llama", "load_roformer"]
