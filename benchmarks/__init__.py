"""Measurements: `python -m benchmarks.NAME`, whichever folder NAME is in.

speed/        time and memory of the operator and of whole models: scaling, decode, goals, gpu_check, ...
experiments/  grids of training runs (ablation), and what is measured of trained models: copying, reach, ...
harness/      what both use: timing, memory, tables, pictures
grids/        what `ablation` runs
results/      what came out, with the command that made each
"""

from pathlib import Path

__path__ += [str(Path(__file__).with_name(folder)) for folder in ("speed", "experiments")]
