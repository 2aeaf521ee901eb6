"""Lightning's trainer for a measurement: one device, no logs, no checkpoints, nothing printed."""

from typing import Any

from lightning.pytorch import Callback, Trainer


def quiet_trainer(max_steps: int, callbacks: list[Callback], device: str = "cpu", **options: Any) -> Trainer:
    return Trainer(
        max_steps=max_steps,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
