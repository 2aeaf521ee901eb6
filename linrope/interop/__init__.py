"""To and from other programs: transformers, torch.export, ONNX."""

from linrope.interop.roformer import export_roformer, load_roformer

__all__ = ["export_roformer", "load_roformer"]
