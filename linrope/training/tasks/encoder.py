"""The base class of tasks that train an encoder with a head."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from linrope.models.encoder import EncoderConfig
from linrope.training.optimizer import OptimizerConfig
from linrope.training.task import TrainingTask


class EncoderTask(TrainingTask):
    """What tasks of encoders share; see `TrainingTask` for what all share. A subclass sets `head` and `data_class`.

    Args:
        model_config: the encoder; its head is set to that of the task.
        optimizer_config: how to train it.
        seed: decides the random numbers of training.
    """

    config_class = EncoderConfig
    head: ClassVar[str]
    """Of the model."""

    def __init__(
        self, model_config: EncoderConfig, optimizer_config: OptimizerConfig | None = None, seed: int = 0
    ) -> None:
        super().__init__(self.config_of(model_config).build(), optimizer_config, seed)

    @classmethod
    def config_of(cls, config: EncoderConfig) -> EncoderConfig:
        return replace(config, head=cls.head)
