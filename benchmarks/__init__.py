"""Measurements: `python -m benchmarks.NAME`.

`scaling`, `decode` and `model_scaling` make tables, CSV, JSON and pictures; `goals` says whether the operator is as
fast and as small as it has to be, `gpu_check` whether the CUDA backend is, and right. What they share: `methods` (what
is measured), `timing`, `memory` (how), `sweep` (points, budgets, crossovers), `report` and `pictures` (what is left
behind).
"""
