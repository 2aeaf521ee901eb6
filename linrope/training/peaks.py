"""What GPUs can do at most, to say what share of it a run reaches: manufacturers' figures, dense, without sparsity."""

from __future__ import annotations

import re

PEAKS: dict[str, tuple[float, float, float]] = {
    # name: TFLOP/s of matrix products in bfloat16 (float16 where there is none), TF32 (float32 where there is none) and
    # float32
    "B200": (2250, 1100, 80),
    "GH200": (989.4, 494.7, 67),
    "H200 NVL": (835, 417.5, 60),
    "H200": (989.4, 494.7, 67),
    "H100 NVL": (835, 417.5, 60),
    "H100 PCIe": (756, 378, 51),
    "H100": (989.4, 494.7, 67),
    "A100": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "V100": (125, 15.7, 15.7),
    "T4": (65, 8.1, 8.1),
    "RTX 6000 Ada": (364.2, 182.1, 91.1),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 4080": (97.5, 48.7, 48.7),
    "RTX 3090": (71, 35.6, 35.6),
}
"""By what stands in `torch.cuda.get_device_name()`, longer names before those they begin with."""


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """FLOP/s of a GPU's matrix products at most, or None where the card or the precision is not in the table.

    Args:
        device_name: as `torch.cuda.get_device_name()` has it.
        precision: Lightning's: "bf16-mixed", "16-true", "32-true", …
        tf32: whether float32 products may be rounded to TF32.
    """
    column = {"bf16": 0, "16": 0, "32": 1 if tf32 else 2}.get(precision.partition("-")[0])
    if column is None:
        return None
    for name, peaks in PEAKS.items():
        if re.search(rf"(?<![\w]){re.escape(name)}(?![\w])", device_name):
            return peaks[column] * 1e12
    return None
