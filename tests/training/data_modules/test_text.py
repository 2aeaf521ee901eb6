import os
import shutil
import warnings
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from linrope.data.batches.curriculum import CurriculumStage
from linrope.data.batches.windows import TrainingWindows
from linrope.errors import DocumentChanged, InputError
from linrope.training import TextDataModule
from linrope.training.agreement import require_same_samples
from linrope.training.checkpoint import require_same_order
from tests.conftest import assert_input_errors, write_documents
from tests.training.attached import attached, first_batches

# Of batches of 2 × 32 = 64 tokens: 4 steps of 4 × 16, 3 steps of 1 × 128, 2 steps of 4 × 16.
UP_AND_DOWN = [
    CurriculumStage(tokens=200, seq_len=16),
    CurriculumStage(tokens=300, seq_len=128, batch_size=1),
    CurriculumStage(tokens=100, seq_len=16),
]


@pytest.mark.parametrize("options", [{}, {"contiguous": True}, {"curriculum": UP_AND_DOWN}])
def test_a_training_loop_without_a_trainer_gets_the_batches_of_one_process(text_file, options):
    data = TextDataModule(str(text_file), context=32, batch_size=2, **options)
    data.setup("fit")
    assert all(map(torch.equal, first_batches(data, 12), first_batches(attached(text_file, **options), 12)))
    windows = [row for batch in data.val_dataloader() for row in batch["targets"]]
    assert len(windows) == (len(data.corpora["val"]) - 1) // 32


def test_text_that_changes_or_goes_away_is_named(text_file):
    train = attached(text_file).corpora["train"]
    times = text_file.stat()
    os.utime(text_file, ns=(0, 5))
    with pytest.raises(DocumentChanged, match=r"corpus\.txt was modified while in use: do not change"):
        train.tokens(0, 10)
    os.utime(text_file, ns=(0, times.st_mtime_ns))
    train.tokens(0, 10)
    text_file.unlink()
    with pytest.raises(DocumentChanged, match=r"corpus\.txt cannot be read any more \(No such file or directory\)"):
        train.tokens(0, 10)


def test_loaders_that_are_not_set_up_say_so(text_file):
    data = TextDataModule(str(text_file))
    for split, stage in (("train", "fit"), ("val", "validate"), ("test", "test")):
        with pytest.raises(InputError, match=rf'the {split} split is not set up: call setup\("{stage}"\)'):
            getattr(data, f"{split}_dataloader")()


@pytest.mark.parametrize("curriculum", [None, UP_AND_DOWN])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_starts_at_any_step_on_any_rank_with_any_number_of_workers(text_file, curriculum, num_workers):
    alone = first_batches(attached(text_file, curriculum=curriculum, accumulate=4), 24)  # 3 stages, 1 step each
    options = {"curriculum": curriculum, "world_size": 2, "accumulate": 2, "num_workers": num_workers}
    for step in range(3):
        for rank in range(2):
            started = first_batches(attached(text_file, rank=rank, step=step, **options), 8)
            assert all(map(torch.equal, started, alone[4 * step + rank :: 2]))


def test_ranks_share_out_validation_without_repeating_a_window(text_file):
    ranks = [attached(text_file, rank=rank, world_size=2, stage="validate") for rank in range(2)]
    windows = [tuple(row.tolist()) for data in ranks for batch in data.val_dataloader() for row in batch["targets"]]
    whole = ranks[0].corpora["val"]
    assert len(windows) == (len(whole) - 1) // 32
    assert sorted(windows) == sorted(map(tuple, whole.tokens(1, 1 + 32 * len(windows)).view(-1, 32).tolist()))


def test_a_curriculum_gives_each_step_the_samples_of_its_stage(text_file):
    data = attached(text_file, curriculum=UP_AND_DOWN, seed=5)
    batches = first_batches(data, 11)
    assert [tuple(batch.shape) for batch in batches] == [(4, 16)] * 4 + [(1, 128)] * 3 + [(4, 16)] * 4
    short, long = (TrainingWindows(data.corpora["train"], seq_len, seed=5) for seq_len in (16, 128))
    for batch, samples in ((batches[0], range(4)), (batches[3], range(12, 16)), (batches[7], range(16, 20))):
        assert torch.equal(batch, torch.stack([short[i]["inputs"] for i in samples]))
    assert torch.equal(batches[5], long[1]["inputs"][None])
    assert torch.equal(data.first_batch(data.plan.stages[2])["inputs"], batches[7])
    masked = attached(text_file, curriculum=UP_AND_DOWN, document_mask=True)  # validation keeps its context
    assert {batch["segment_ids"].shape[1] for batch in masked.val_dataloader()} == {32}
    both = attached(text_file, curriculum=UP_AND_DOWN, world_size=2, accumulate=2)
    assert [both.tokens_at(step) for step in range(5)] == [0, 256, 768, 1024, 1280]  # of all devices and batches


def test_a_curriculum_of_one_length_is_training_without_one(text_file):
    plain = attached(text_file)
    once = attached(text_file, context=8, curriculum=[CurriculumStage(1, 32, 2)])
    twice = attached(text_file, curriculum=[CurriculumStage(320, 32), CurriculumStage(1, 32)])
    for data in (once, twice):
        assert all(map(torch.equal, first_batches(data, 12), first_batches(plain, 12)))
    assert [plain.tokens_at(step) for step in (0, 1, 9)] == [0, 64, 576]


SPLIT, STAGE = r"the {} split holds .* too few for one sample of {}", r"data\.curriculum\[{}\]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, r"data\.context=0 must be 1 or more"),
        ({"batch_size": -1}, r"data\.batch_size=-1 must be 1 or more"),
        ({"batch_size": 10**9}, r"data\.context · data\.batch_size = 32,000,000,000 tokens are more than"),
        ({"num_workers": 10**9}, r"data\.num_workers=1000000000 must be at most 1024"),
        (
            {"curriculum": [CurriculumStage(1, 16, 10**9)]},
            r"\.seq_len · batch_size = 16,000,000,000 tokens",
        ),
        ({"num_workers": -1}, r"data\.num_workers=-1 must be 0 or more"),
        ({"fractions": [0.9985, 0.001, 0.0005]}, SPLIT.format("val", r"data\.context=32 \+ 1")),
        ({"split": "file"}, r"data\.split='file' is unknown: choose one of 'document', 'position'"),
        ({"curriculum": 5}, r"data\.curriculum=5 must be a list of stages"),
        ({"curriculum": {"tokens": 64, "seq_len": 16}}, r"data\.curriculum=\{'tokens.* must be a list of stages"),
        ({"curriculum": []}, r"data\.curriculum=\[\] has no stage: give at least one, or null"),
        ({"curriculum": [5]}, STAGE.format(0) + ": 5 cannot be the options"),
        ({"curriculum": [{"seq_len": 16}]}, r"needs 'tokens', which has no default"),
        ({"curriculum": [{"tokens": 64, "seq_length": 16}]}, STAGE.format(0) + ": 'seq_length' is .* mean 'seq_len'"),
        ({"curriculum": [{"tokens": 1.5, "seq_len": 16}]}, STAGE.format(0) + r"\.tokens=1\.5 must be a whole number"),
        ({"curriculum": [{"tokens": None, "seq_len": 16}]}, STAGE.format(0) + r"\.tokens=None must be"),
        ({"curriculum": [CurriculumStage(1, 16), CurriculumStage(1, 0)]}, STAGE.format(1) + r"\.seq_len=0 must be"),
        ({"curriculum": [CurriculumStage(1, 16, 0)]}, STAGE.format(0) + r"\.batch_size=0 must be .* 1 or more"),
        ({"curriculum": [CurriculumStage(1, 24)]}, r"\.seq_len=24 does not divide .* = 64, .* give the stage a batch"),
        ({"curriculum": [CurriculumStage(1, 128)]}, STAGE.format(0) + r"\.seq_len=128 does not divide"),
        (
            {"curriculum": [CurriculumStage(1, 99999, 1)]},
            SPLIT.format("train", STAGE.format(0) + r"\.seq_len=99999 \+ 1: lower data\.curr"),
        ),
    ],
)
def test_options_that_cannot_be_are_named(text_file, options, message):
    with pytest.raises(InputError, match=message):
        attached(text_file, **options)


@pytest.mark.parametrize("max_steps", [-1, 8])
def test_a_run_must_be_as_long_as_its_curriculum(text_file, max_steps):
    attached(text_file, curriculum=UP_AND_DOWN, max_steps=9)
    attached(text_file, curriculum=UP_AND_DOWN, max_steps=max_steps, stage="validate")  # which trains nothing
    with pytest.raises(InputError, match=rf"max_steps={max_steps} ends before .* takes 9 optimizer steps: set it"):
        attached(text_file, curriculum=UP_AND_DOWN, max_steps=max_steps)


def test_the_order_names_all_that_decides_it_in_plain_values(text_file, tmp_path):
    options = {"curriculum": UP_AND_DOWN[:2], "seed": 7, "document_mask": True}
    order = attached(text_file, **options).order()
    fingerprints = {name: order.pop(name) for name in ("train_documents", "text_hash")}
    assert order == {
        "fractions": [0.9, 0.05, 0.05],
        "split": None,
        "context": 32,
        "batch_size": 2,
        "seed": 7,
        "document_mask": True,
        "contiguous rows × devices": None,
        "curriculum": [asdict(stage) for stage in (replace(UP_AND_DOWN[0], batch_size=4), UP_AND_DOWN[1])],
        "train_tokens": len(attached(text_file).corpora["train"]),
        "text_modified": None,
        "place": str(text_file),
        "tokenizer": None,
    }
    again = attached(text_file, **{**options, "curriculum": order["curriculum"]}).order()
    assert again == {**order, **fingerprints}
    assert attached(text_file).order()["curriculum"] is None
    torch.save(order, tmp_path / "order.pt")
    assert torch.load(tmp_path / "order.pt", weights_only=True) == order


def test_files_that_a_run_knew_by_other_names_are_not_held_out_in_silence(tmp_path):
    (tmp_path / "texts").mkdir()
    folder = write_documents(tmp_path / "texts" / "a", [100] * 25)
    shutil.copytree(folder, tmp_path / "texts" / "b")
    options = {"fractions": [0.5, 0.25, 0.25], "context": 32, "batch_size": 2}

    def order_of(path: Path) -> dict:
        return {f"data.{name}": value for name, value in attached(path, **options).order().items()}

    order, above = order_of(folder), order_of(tmp_path / "texts")
    told = rf"its data\.path was {folder}, below which files have other names: .* trained on some text that is held out"
    with pytest.warns(UserWarning, match=told):
        TextDataModule(str(tmp_path / "texts"), **options).keep_split_of(order)
    with pytest.warns(UserWarning, match=f"was {tmp_path / 'texts'}, below"):
        TextDataModule(str(folder / "003.txt"), **options).keep_split_of(above)
    with warnings.catch_warnings():  # files of the same names, fewer or elsewhere
        warnings.simplefilter("error")
        for path in (folder / "*.txt", folder / "0[01]*.txt", tmp_path / "texts" / "b"):
            TextDataModule(str(path), **options).keep_split_of(order)
    moved = order_of(tmp_path / "texts" / "b")
    assert moved["data.place"] != order["data.place"]
    require_same_order({"linrope": {"order": order}}, moved, "last.ckpt")
    require_same_samples([order, moved])


def test_the_orders_fingerprint_follows_names_and_sizes(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()

    def fingerprint(**sizes: int) -> str:
        for file in folder.iterdir():
            file.unlink()
        for name, size in sizes.items():
            (folder / name).write_text("x" * size)
        return attached(folder, fractions=[1.0, 0.0, 0.0]).order()["train_documents"]

    first = fingerprint(a=100, b=200)
    assert first == fingerprint(b=200, a=100)
    others = [fingerprint(a=101, b=199), fingerprint(a=100, c=200), fingerprint(a=301)]
    assert all(one != other for one, other in pairwise([first, *others, first]))
    assert len({first, *others}) == 4


# --- validation and test text of one's own ----------------------------------------------------------------------------


def own_text(folder: Path, name: str, size: int) -> str:
    (folder / name).write_bytes(bytes(97 + i * i % 26 for i in range(size)))
    return str(folder / name)


def test_a_split_with_a_path_of_its_own_is_that_whole_text(text_file, tmp_path):
    val, test = own_text(tmp_path, "valid.txt", 500), own_text(tmp_path, "wiki.test", 700)
    whole = text_file.stat().st_size
    both = attached(text_file, val_path=val, test_path=test)
    assert {split: corpus.n_bytes for split, corpus in both.corpora.items()} == {
        "train": whole,
        "val": 500,
        "test": 700,
    }
    read = torch.cat([row for batch in both.val_dataloader() for row in batch["targets"]]).tolist()
    assert len(read) == 480
    assert set(read) <= set(range(97, 123))
    assert both.has_validation_text
    assert dict(both.describe())["  val"] == f"500 bytes in 1 document, from {val}"
    assert both.describe_split("test") == f"{test}: 700 bytes in 1 document"
    one = attached(text_file, test_path=test)  # the share of the test split is trained on
    assert [one.corpora[split].n_bytes for split in ("train", "val")] == [
        round(0.95 * whole),
        whole - round(0.95 * whole),
    ]
    assert one.fractions == [0.95, 0.05, 0.0]
    assert (
        one.describe_split("val")
        == f"the val split of {text_file}: {whole - round(0.95 * whole):,} bytes in 1 document"
    )
    for options in ({"contiguous": True}, {"document_mask": True}, {"curriculum": UP_AND_DOWN}):
        rows = attached(text_file, val_path=val, **options)
        assert rows.corpora["val"].n_bytes == 500
        first_batches(rows, 2)


def test_a_measurement_of_a_text_of_its_own_needs_no_other(tmp_path):
    data = TextDataModule(
        "/nowhere", context=32, fractions=[0.5, 0, 0.5], test_path=own_text(tmp_path, "test.txt", 700)
    )
    data.measure("test")
    data.keep_split_of({"data.split": "position", "data.fractions": [0.5, 0.25, 0.25], "data.train_documents": "a"})
    data.setup("test")
    assert (list(data.corpora), data.corpora["test"].n_bytes, data.fractions) == (["test"], 700, None)
    with pytest.raises(
        InputError, match=r"data\.path is not read: this run's test text is data\.test_path='/.*test\.txt'"
    ):
        data.measure_path()


def test_a_measurement_does_not_open_the_text_of_the_other_split(text_file):
    data = TextDataModule(str(text_file), context=32, val_path="nowhere.txt")
    data.measure("test")
    data.setup("test")
    assert data.describe_split("test").startswith(f"the test split of {text_file}: ")
    assert data.fractions == [0.95, 0.0, 0.05]


def test_a_resumed_run_has_the_same_validation_text(text_file, tmp_path):
    val, other = own_text(tmp_path, "valid.txt", 500), own_text(tmp_path, "other.txt", 501)
    order, changed = (attached(text_file, val_path=path).order() for path in (val, other))
    assert order.pop("val_documents") != changed.pop("val_documents")
    assert order == changed
    assert "val_documents" not in attached(text_file, test_path=val).order()


def test_tokens_and_shares_of_a_text_of_its_own_that_cannot_be_are_named(text_file, tmp_path):
    val, flat = own_text(tmp_path, "valid.txt", 500), tmp_path / "val.bin"
    np.arange(400, dtype="<u2").tofile(flat)
    train = shutil.copy(flat, tmp_path / "train.bin")
    assert_input_errors(
        (lambda: attached(text_file, val_path=""), r"data\.val_path is empty: give a path"),
        (lambda: attached(text_file, test_path="nowhere"), r"data\.test_path='nowhere' does not exist"),
        (
            lambda: attached(text_file, val_path=val, fractions=[0.8, 0.1, 0.1]),
            r"data\.fractions=\[0\.8, 0\.1, 0\.1\] gives 0\.1 of data\.path to val, which has its own text, data\.val",
        ),
        (
            lambda: attached(tmp_path / "*.txt", val_path=val),
            r"data\.val_path='.*valid\.txt' is part of data\.path \(/",
        ),
        (lambda: attached(train, test_path=str(train)), r"data\.test_path='.*train\.bin' is part of data\.path \(/"),
        (
            lambda: attached(text_file, val_path=str(flat)),
            r"another tokenizer \(an unknown one\) than data.path \(bytes\)",
        ),
    )
    data = attached(train, val_path=str(flat), fractions=[0.6, 0, 0.4])  # nanoGPT's two files
    assert [len(corpus) for corpus in data.corpora.values()] == [240, 400, 160]
    with pytest.raises(InputError, match=r"the text \(.*val\.bin holds 399 at position 399\): set it to 400 or more"):
        data.require_vocabulary(399)
