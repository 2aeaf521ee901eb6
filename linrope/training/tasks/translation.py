"""Translation: an encoder–decoder reads a sentence and writes it in another language."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.errors import InputError
from linrope.evaluation.translation_scores import require_sacrebleu, translation_scores
from linrope.generation.translation import translate
from linrope.losses import IGNORE, per_target, token_losses
from linrope.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from linrope.training.data_modules.translation import TranslationDataModule
from linrope.training.optimizer import OptimizerConfig
from linrope.training.task import Batch, BatchLoss, TrainingTask


@dataclass(frozen=True)
class TranslationConfig:
    """The loss, and how `linrope test` and `linrope predict` translate."""

    label_smoothing: float = 0.1
    """Share of the target distribution that is spread over all tokens, in training only."""
    n_beams: int = 4
    """Hypotheses of beam search; 1 is greedy decoding."""
    length_penalty: float = 0.6
    """α of ((5 + n) / 6)^α, by which log probabilities of n tokens are divided; 0 prefers short translations."""
    extra_tokens: int = 50
    """A translation has at most this many tokens more than its source."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"translation.label_smoothing={self.label_smoothing} must be at least 0 and below 1.")
        if self.n_beams < 1:
            raise InputError(f"translation.n_beams={self.n_beams} must be 1 or more.")
        if not 0 <= self.length_penalty < math.inf:
            raise InputError(f"translation.length_penalty={self.length_penalty} must be a finite number, 0 or more.")
        if self.extra_tokens < 0:
            raise InputError(f"translation.extra_tokens={self.extra_tokens} must be 0 or more.")


class TranslationModule(TrainingTask):
    """Trains an `EncoderDecoder` on the batches of a `TranslationDataModule`; see `TrainingTask` for what tasks share.

    Logs `train_loss` (nats per target token, smoothed) of each optimizer step, and `val_loss` (without smoothing) and
    `val_accuracy` (the share of target tokens that have the highest logit, given those before) of a whole validation.
    A test has the same and, of translations by beam search, `test_bleu` and `test_chrf`; these need the package
    sacrebleu (the extra `translation`).

    Args:
        model_config: the encoder–decoder to build, or one to train further.
        optimizer_config: how to train it.
        seed: decides the random numbers of training.
        translation: the loss, and the beam search.
    """

    config_class, data_class = EncoderDecoderConfig, TranslationDataModule
    own_sections: ClassVar[Mapping[str, type]] = {"translation": TranslationConfig}

    def __init__(
        self,
        model_config: EncoderDecoderConfig | EncoderDecoder,
        optimizer_config: OptimizerConfig | None = None,
        seed: int = 0,
        translation: TranslationConfig | None = None,
    ) -> None:
        super().__init__(model_config, optimizer_config, seed)
        self.translation = translation or TranslationConfig()

    def setup(self, stage: str) -> None:
        if stage == "test":
            require_sacrebleu()
        super().setup(stage)

    def forward(self, inputs: Tensor, decoder_inputs: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocab_size) of the tokens after decoder_inputs (B, T), of sources (B, S)."""
        return self.model(inputs, decoder_inputs, source_mask)

    def batch_loss(self, batch: Batch) -> BatchLoss:
        inputs, targets = (batch["inputs"], batch["decoder_inputs"], batch["source_mask"]), batch["targets"]
        nats = self.model(*inputs, targets=targets, label_smoothing=self.translation.label_smoothing)
        return BatchLoss(nats, (targets != IGNORE).sum(), batch["n_positions"])

    def evaluate(self, batch: Batch, sums: dict[Hashable, Any]) -> None:
        logits, targets = self(batch["inputs"], batch["decoder_inputs"], batch["source_mask"]), batch["targets"]
        asked = targets != IGNORE
        right = (logits.argmax(-1) == targets) & asked
        of_batch = torch.stack([token_losses(logits, targets).sum(), right.sum().float(), asked.sum().float()])
        sums["targets"] = sums.get("targets", 0) + of_batch.cpu().double()
        if self.trainer.testing:
            pairs = list(zip(self._translated(batch), batch["references"], strict=True))
            sums["translations"] = sums.get("translations", []) + pairs

    def evaluation_metrics(self, split: str, sums: dict[Hashable, Any]) -> dict[str, float]:
        nats, right, asked = sums["targets"].tolist()
        metrics = {f"{split}_loss": per_target(nats, asked), f"{split}_accuracy": per_target(right, asked)}
        if "translations" in sums:
            scores = translation_scores(*zip(*sums["translations"], strict=True))
            metrics |= {f"{split}_{name}": score for name, score in scores.items()}
        return metrics

    def predict_step(self, batch: Batch, batch_idx: int) -> list[dict[str, Any]]:
        """Each source and its translation."""
        pairs = zip(batch["sources"], self._translated(batch), strict=True)
        return [{"source": source, "translation": translation} for source, translation in pairs]

    def configure_model(self) -> None:
        super().configure_model()
        if self.is_sharded and self._stage == "test":
            raise InputError(
                "translations end at different steps, which devices that share a model cannot: run `linrope test` on "
                "one device (trainer.devices=1, without trainer.strategy)."
            )

    def _translated(self, batch: Batch) -> list[str]:
        config, tokenizer = self.translation, tokenizer_from_serialized(self.model.tokenizer)
        options = {name: getattr(config, name) for name in ("n_beams", "length_penalty", "extra_tokens")}
        longest = self.model.longest_row
        return translate(self.model, batch["inputs"], batch["source_mask"], tokenizer, longest_row=longest, **options)
