"""Where a rank is in its run, for the message that names a rank which hangs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from linrope.training.rank_board import RankBoard


class RankProgress(Callback):
    """Notes on the board, in memory, which part of which step this rank has finished."""

    def __init__(self, board: RankBoard) -> None:
        self.board = board

    def _pass(self, trainer: Trainer, place: str) -> None:
        self.board.pass_by(trainer.global_step + 1, place)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "reading the batch")

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "the forward pass")

    def on_after_backward(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "the backward pass")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "the weights' update")

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "reading a batch of the validation")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "a batch of the validation")

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self._pass(trainer, "the validation")
