from itertools import islice

import pytest

from linrope.data.batches.curriculum import CurriculumStage, TrainingBatches, TrainingPlan

UP_AND_DOWN = [
    CurriculumStage(tokens=200, seq_len=16, batch_size=4),  # 64 tokens a batch
    CurriculumStage(tokens=300, seq_len=128, batch_size=1),  # 128
    CurriculumStage(tokens=100, seq_len=16, batch_size=4),
]


def samples(plan: TrainingPlan, n: int, **options: int) -> list[list[tuple[int, int]]]:
    return list(islice(TrainingBatches(plan, **options), n))


def test_a_stage_lasts_the_fewest_whole_steps_that_hold_its_tokens():
    plan = TrainingPlan(UP_AND_DOWN)
    assert [(stage.first_step, stage.n_steps) for stage in plan.stages] == [(0, 4), (4, 3), (7, 2)]
    assert plan.n_steps == 9
    assert [plan.index_at(step) for step in (0, 3, 4, 6, 7, 8, 9, 1000)] == [0, 0, 1, 1, 2, 2, 2, 2]
    four_batches = TrainingPlan(UP_AND_DOWN, batches_per_step=4)  # 256 and 512 tokens a step
    assert [(stage.n_steps, stage.samples_per_step) for stage in four_batches.stages] == [(1, 16), (1, 4), (1, 16)]
    exact = TrainingPlan([CurriculumStage(128, 16, 4), CurriculumStage(1, 16, 4)])
    assert [stage.n_steps for stage in exact.stages] == [2, 1]


def test_tokens_are_counted_by_stage_and_steps_within_them_are_the_most_that_train_on_no_more():
    plan = TrainingPlan(UP_AND_DOWN)
    assert [plan.tokens_at(step) for step in (0, 1, 4, 5, 7, 8, 9, 19)] == [0, 64, 256, 384, 640, 704, 768, 1408]
    for tokens in range(1500):
        steps = plan.steps_within(tokens)
        assert plan.tokens_at(steps) <= tokens < plan.tokens_at(steps + 1)


def test_samples_go_on_counting_within_a_length():
    batches = samples(TrainingPlan(UP_AND_DOWN), 10)
    assert batches[0] == [(16, 0), (16, 1), (16, 2), (16, 3)]
    assert batches[3] == [(16, 12), (16, 13), (16, 14), (16, 15)]
    assert batches[4:7] == [[(128, 0)], [(128, 1)], [(128, 2)]]
    assert batches[7] == [(16, 16), (16, 17), (16, 18), (16, 19)]  # after the first stage's
    drawn = [sample for batch in batches for sample in batch]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("step", range(12))
def test_every_step_can_be_started_from(step):
    for batches_per_step in (1, 2):
        plan = TrainingPlan(UP_AND_DOWN, batches_per_step)
        whole = samples(plan, 12 * batches_per_step)
        assert samples(plan, batches_per_step, first_step=step) == whole[step * batches_per_step :][:batches_per_step]


@pytest.mark.parametrize(
    ("sizes", "step", "expected"),
    [
        ([(256, 8), (1024, 2)], 0, [1]),  # as many tokens, longer rows
        ([(1024, 2), (256, 8)], 0, []),
        ([(256, 8), (1024, 2), (512, 4), (1024, 2)], 0, [1]),  # once is enough
        ([(256, 8), (4096, 1), (1024, 8)], 0, [1, 2]),  # the longest rows, the most tokens
        ([(4096, 1), (1024, 8)], 0, [1]),
        ([(256, 8), (1024, 2), (512, 2)], 1, []),  # the largest stage has begun
        ([(256, 8), (1024, 2), (512, 2)], 2, []),
        ([(256, 8)], 5, []),
    ],
)
def test_the_stages_that_may_need_most_memory(sizes, step, expected):
    plan = TrainingPlan([CurriculumStage(1, seq_len, batch_size) for seq_len, batch_size in sizes])  # a step each
    assert plan.larger_later(step) == expected
