from types import SimpleNamespace

import pytest
import torch

from linrope.errors import InputError
from linrope.training import TextDataModule


def attached(text_file, *, rank=0, world_size=1, step=0, accumulate=1, stage="fit", **options) -> TextDataModule:
    """A data module set up for rank `rank` of a trainer that has finished `step` steps."""
    data = TextDataModule(str(text_file), context=32, batch_size=2, **options)
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        global_step=step,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1.0,
        state=SimpleNamespace(fn=stage),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup(stage)
    return data


def first_batches(data: TextDataModule, n: int) -> list[torch.Tensor]:
    loader = iter(data.train_dataloader())
    return [next(loader)["inputs"] for _ in range(n)]


def test_batches_have_inputs_and_targets(text_file):
    batch = next(iter(attached(text_file).train_dataloader()))
    assert batch["inputs"].shape == batch["targets"].shape == (2, 32)
    assert batch["inputs"].dtype == torch.int64
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_two_ranks_see_between_them_what_one_sees(text_file):
    alone = first_batches(attached(text_file), 6)
    ranks = [first_batches(attached(text_file, rank=rank, world_size=2), 3) for rank in range(2)]
    together = [ranks[i % 2][i // 2] for i in range(6)]
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_starts_after_what_its_step_has_seen(text_file, num_workers):
    alone = first_batches(attached(text_file), 14)
    resumed = first_batches(attached(text_file, rank=1, world_size=2, step=3, accumulate=2, num_workers=num_workers), 1)
    assert torch.equal(resumed[0], alone[13])  # 3 steps × 2 batches × 2 ranks, then the other rank's


def test_ranks_share_out_validation_without_repeating_a_window(text_file):
    ranks = [attached(text_file, rank=rank, world_size=2, stage="validate") for rank in range(2)]
    windows = [tuple(row.tolist()) for data in ranks for batch in data.val_dataloader() for row in batch["targets"]]
    whole = ranks[0].corpora["val"]
    assert len(windows) == (len(whole) - 1) // 32
    assert sorted(windows) == sorted(map(tuple, whole.tokens(1, 1 + 32 * len(windows)).view(-1, 32).tolist()))


def test_without_a_validation_share_there_is_no_validation(text_file):
    assert attached(text_file, fractions=[0.9, 0.0, 0.1]).val_dataloader() == []


def test_a_split_that_is_too_short_stops_the_setup(text_file):
    with pytest.raises(InputError, match=r"the val split holds .* too few for one sample of data\.context=32 \+ 1"):
        attached(text_file, fractions=[0.9985, 0.001, 0.0005])


@pytest.mark.parametrize(("option", "value"), [("context", 0), ("batch_size", -1), ("num_workers", -1)])
def test_options_out_of_range_are_named(option, value):
    with pytest.raises(InputError, match=rf"data\.{option}={value} must be"):
        TextDataModule(**{option: value})
