"""Language models as ONNX graphs, for onnxruntime.

`export.export_onnx` writes one, `runtime.OnnxLanguageModel` runs it.
"""
