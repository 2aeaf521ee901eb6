"""The base class of tasks that train an encoder with a head."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from linrope.errors import InputError
from linrope.models.encoder import EncoderConfig, EncoderModel
from linrope.training.optimizer import OptimizerConfig
from linrope.training.task import TrainingTask


class EncoderTask(TrainingTask):
    """What tasks of encoders share; see `TrainingTask` for what all share. A subclass sets `head` and `data_class`.

    Args:
        model_config: the encoder to build, whose head is set to that of the task; or one to train further.
        optimizer_config: how to train it.
        seed: decides the random numbers of training.
    """

    config_class = EncoderConfig
    head: ClassVar[str]
    """Of the model."""

    def __init__(
        self, model_config: EncoderConfig | EncoderModel, optimizer_config: OptimizerConfig | None = None, seed: int = 0
    ) -> None:
        super().__init__(model_config, optimizer_config, seed)
        if (head := self.model_config.head) != self.head:
            raise InputError(
                f"{type(self).__name__} trains an encoder with head={self.head!r}, and this one has {head!r}: pass its "
                "`config`, and then give its weights to `model.take` of the new one."
            )

    @classmethod
    def config_of(cls, config: EncoderConfig) -> EncoderConfig:
        return replace(config, head=cls.head)
