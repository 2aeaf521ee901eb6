"""How long the rows of training are: the stages of a curriculum, laid out over the optimizer steps of a run.

Arithmetic like the order of samples itself (see `windows`): the samples of any step follow from the stages and the
step's number, so a run can start at any of them.
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
    """A stretch of training on rows of one length."""

    tokens: int
    """Tokens to train on, over all devices; rounded up to whole optimizer steps."""
    seq_len: int
    """Tokens of one sample."""
    batch_size: int | None = None
    """Samples of one batch, per device; null for as many tokens a batch as data.context · data.batch_size."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage as a run takes it: from optimizer step `first_step` on, counted from 0, samples `first_sample` … of its
    length."""

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
    """Which samples every optimizer step of a run has.

    A stage lasts the fewest whole steps that hold its tokens, so no step mixes two lengths; the last one goes on for as
    long as the run does. Samples are counted by length: a stage goes on where the one before it of its length stopped.

    Args:
        stages: at least one, each with its batch size.
        batches_per_step: batches of one optimizer step, over all devices.
    """

    def __init__(self, stages: Sequence[CurriculumStage], batches_per_step: int = 1) -> None:
        if batches_per_step < 1:
            raise InputError(
                f"trainer.accumulate_grad_batches × devices = {batches_per_step}: a step needs at least one batch. Set "
                "trainer.accumulate_grad_batches to 1 or more."
            )
        self.batches_per_step = batches_per_step
        self.stages: list[PlannedStage] = []
        self.n_steps = 0  # that the stages ask for
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

    def tokens_at(self, step: int) -> int:
        """Tokens that a run has trained on, over all devices, after `step` optimizer steps."""
        now = self.index_at(step)
        finished = sum(stage.n_steps * stage.tokens_per_step for stage in self.stages[:now])
        return finished + (step - self.stages[now].first_step) * self.stages[now].tokens_per_step

    def steps_within(self, tokens: float) -> int:
        """The most optimizer steps that train on no more than so many tokens."""
        now = bisect_right([self.tokens_at(first) for first in self._first_steps], tokens) - 1
        stage = self.stages[now]
        return stage.first_step + int((tokens - self.tokens_at(stage.first_step)) // stage.tokens_per_step)

    def larger_later(self, step: int) -> list[int]:
        """The stages after that of `step` which may need more memory than any other from there on.

        A batch may be large by its tokens or by its length (what softmax attention takes grows with its square): a
        stage is left out where another has no fewer of both.
        """
        ahead = range(self.index_at(step), len(self.stages))
        sizes = {n: (self.stages[n].batch_size * self.stages[n].seq_len, self.stages[n].seq_len) for n in ahead}
        largest: list[int] = []
        for n in sorted(ahead, key=sizes.__getitem__, reverse=True):  # the first of equals stays first
            if all(sizes[n][1] > sizes[other][1] for other in largest):  # which have no fewer tokens
                largest.append(n)
        return sorted(n for n in largest if n != ahead[0])


class TrainingBatches:
    """Endless lists of a batch's samples, those of one rank, from optimizer step `first_step` on.

    A step's samples are dealt to ranks batch by batch: batch `b` of rank `r` is the step's `b · world_size + r`-th.
    """

    def __init__(self, plan: TrainingPlan, first_step: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.plan, self.first_step, self.rank, self.world_size = plan, first_step, rank, world_size

    def __iter__(self) -> Iterator[list[Sample]]:
        for step in count(self.first_step):
            stage = self.plan.stage_at(step)
            first = stage.first_sample + (step - stage.first_step) * stage.samples_per_step
            for batch in range(self.rank, self.plan.batches_per_step, self.world_size):
                start = first + batch * stage.batch_size
                yield [(stage.seq_len, i) for i in range(start, start + stage.batch_size)]
