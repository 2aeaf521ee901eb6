"""Length curricula: stages of training on rows of one length each, and the samples of every optimizer step.

Like the order of samples itself (see `windows`) this is arithmetic: the samples of a step follow from the stages and
the step's number, so a run can start at any step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from linrope.errors import InputError

Sample = tuple[int, int]
"""(seq_len, i): sample `i` of that length."""


@dataclass(frozen=True)
class CurriculumStage:
    """A stage of training on rows of one length."""

    tokens: int
    """Tokens to train on, over all devices; rounded up to whole optimizer steps."""
    seq_len: int
    """Tokens of one sample."""
    batch_size: int | None = None
    """Samples of one batch, per device; null for data.context · data.batch_size tokens in a batch."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage in a run: it starts at optimizer step `first_step`, counted from 0, with sample `first_sample`."""

    seq_len: int
    batch_size: int
    """Samples of one batch, per device."""
    samples_per_step: int
    """Samples of one optimizer step, over its batches and all devices."""
    first_step: int
    n_steps: int
    first_sample: int

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.seq_len


class TrainingPlan:
    """The samples of every optimizer step of a run.

    A stage lasts the fewest whole steps that hold its tokens, so no step mixes two lengths; the last stage has no end.
    Samples are counted by length: a stage continues after the samples of earlier stages of its length. There is at
    least one stage, each with its batch size. `batches_per_step` are those of one optimizer step, over all devices.
    """

    def __init__(self, stages: Sequence[CurriculumStage], batches_per_step: int = 1) -> None:
        if batches_per_step < 1:
            raise InputError(
                f"trainer.accumulate_grad_batches × devices = {batches_per_step}: a step needs at least one batch. Set "
                "trainer.accumulate_grad_batches to 1 or more."
            )
        self.batches_per_step = batches_per_step
        self.stages: list[PlannedStage] = []
        self.n_steps = 0  # of all stages
        drawn: Counter[int] = Counter()  # samples of each length
        for stage in stages:
            samples = stage.batch_size * batches_per_step
            n_steps = -(-stage.tokens // (samples * stage.seq_len))
            self.stages.append(
                PlannedStage(stage.seq_len, stage.batch_size, samples, self.n_steps, n_steps, drawn[stage.seq_len])
            )
            self.n_steps += n_steps
            drawn[stage.seq_len] += n_steps * samples
        self._first_steps = [stage.first_step for stage in self.stages]

    def index_at(self, step: int) -> int:
        """The number of the stage that optimizer step `step ≥ 0` belongs to."""
        return bisect_right(self._first_steps, step) - 1

    def stage_at(self, step: int) -> PlannedStage:
        """The stage that optimizer step `step ≥ 0` belongs to."""
        return self.stages[self.index_at(step)]

    def first_sample_of(self, step: int) -> int:
        """The first sample of optimizer step `step ≥ 0`, counted within its length."""
        stage = self.stage_at(step)
        return stage.first_sample + (step - stage.first_step) * stage.samples_per_step

    def tokens_at(self, step: int) -> int:
        """Tokens that a run has trained on, over all devices, after `step` optimizer steps."""
        now = self.index_at(step)
        finished = sum(stage.n_steps * stage.tokens_per_step for stage in self.stages[:now])
        return finished + (step - self.stages[now].first_step) * self.stages[now].tokens_per_step

    def steps_within(self, tokens: float) -> int:
        """The largest number of optimizer steps with at most `tokens` tokens."""
        now = bisect_right([self.tokens_at(first) for first in self._first_steps], tokens) - 1
        stage = self.stages[now]
        return stage.first_step + int((tokens - self.tokens_at(stage.first_step)) // stage.tokens_per_step)

    def larger_later(self, step: int) -> list[int]:
        """The numbers of the stages after that of `step` that may need the most memory from there on.

        Memory grows with a batch's tokens and with its length (softmax attention: with its square), so a stage is
        omitted if another has at least as much of both.
        """
        ahead = range(self.index_at(step), len(self.stages))
        sizes = {n: (self.stages[n].batch_size * self.stages[n].seq_len, self.stages[n].seq_len) for n in ahead}
        largest: list[int] = []
        for n in sorted(ahead, key=sizes.__getitem__, reverse=True):  # the first of equals stays first
            if all(sizes[n][1] > sizes[other][1] for other in largest):  # which have no fewer tokens
                largest.append(n)
        return sorted(n for n in largest if n != ahead[0])


class TrainingBatches:
    """The training batches of one rank, each a list of samples: endless, from optimizer step `first_step` on.

    Batch `b` of rank `r` is number `b · world_size + r` of its step.
    """

    def __init__(self, plan: TrainingPlan, first_step: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.plan, self.first_step, self.rank, self.world_size = plan, first_step, rank, world_size

    def __iter__(self) -> Iterator[list[Sample]]:
        for step in count(self.first_step):
            stage, first = self.plan.stage_at(step), self.plan.first_sample_of(step)
            for batch in range(self.rank, self.plan.batches_per_step, self.world_size):
                start = first + batch * stage.batch_size
                yield [(stage.seq_len, i) for i in range(start, start + stage.batch_size)]
