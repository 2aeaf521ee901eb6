"""Data modules of fine-tuning: ranks, workers, notes, and what is wrong with their files."""

import pickle
from itertools import islice
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from linrope.errors import InputError
from linrope.training.data_modules.base import RunPosition
from linrope.training.data_modules.classification import ClassificationDataModule
from linrope.training.data_modules.finetune import FineTuningDataModule
from linrope.training.data_modules.multiple_choice import MultipleChoiceDataModule
from linrope.training.data_modules.question_answering import QuestionAnsweringDataModule
from linrope.training.data_modules.token_classification import TokenClassificationDataModule
from tests.conftest import assert_input_errors


def write_rows(folder: Path, n: int = 11, **files: str) -> Path:
    rows = "".join(f"{'x' * (i * i % 7)} {i}\t{'ab'[i % 2]}\n" for i in range(n))
    for name in ("train", "dev", "test"):
        (folder / f"{name}.tsv").write_text(files.get(name, f"text\tlabel\n{rows}"))
    return folder


def at(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch, **position: int) -> None:
    """Makes all data modules think that they are at this place of a run."""
    place = RunPosition(rank, world_size, **position)
    monkeypatch.setattr(FineTuningDataModule, "run_position", place)


def data_of(folder: Path, stage: str = "fit", **options) -> ClassificationDataModule:
    data = ClassificationDataModule(path=str(folder), batch_size=2, **options)
    data.setup(stage)
    return data


def test_ranks_share_the_batches_of_training_and_the_rows_of_evaluation(tmp_path, monkeypatch):
    folder = write_rows(tmp_path)
    whole = [batch["id"] for batch in islice(data_of(folder).train_dataloader(), 9)]
    validated = []
    for rank in range(3):
        at(rank, 3, monkeypatch, batches_per_step=1, step=1)  # resumed after a step
        data = data_of(folder)
        mine = [batch["id"] for batch in islice(data.train_dataloader(), 2)]
        assert mine == whole[3 + rank :: 3]
        validated += [id_ for batch in data.val_dataloader() for id_ in batch["id"]]
    assert sorted(validated, key=int) == [str(i) for i in range(11)]
    at(0, 3, monkeypatch)
    assert data.steps_per_epoch_for(3) == 2  # ⌈11 / 6⌉
    assert data.samples_of(2) == "rows 12 … 17 of the shuffled epochs"
    at(0, 12, monkeypatch)
    assert_input_errors((lambda: data_of(folder), "the train split has 11 rows for 12 devices"))


def test_a_worker_makes_the_same_batches(tmp_path):
    folder = write_rows(tmp_path)
    batches = [list(data_of(folder, num_workers=n).val_dataloader()) for n in (0, 1)]
    assert len(batches[0]) == len(batches[1]) == 6
    for one, other in zip(*batches):
        assert one.keys() == other.keys() == {"inputs", "key_mask", "token_types", "targets", "id", "group"}
        assert all(torch.equal(one[name], other[name]) for name in ("inputs", "key_mask", "token_types", "targets"))
    rows = pickle.loads(pickle.dumps(data_of(folder)._rows["val"]))
    assert torch.equal(rows[[int(id_) for id_ in batches[0][0]["id"]]]["inputs"], batches[0][0]["inputs"])


def test_labels_have_the_numbers_of_their_sorted_names(tmp_path):
    data = data_of(write_rows(tmp_path))
    for batch in data.val_dataloader():
        assert batch["targets"].tolist() == [int(id_) % 2 for id_ in batch["id"]]
    assert data.labels == ("a", "b")
    assert (data.n_labels, data.metrics) == (2, ("accuracy", "f1"))
    assert data.order()["train_rows"] == 11
    hashes = {data.order()["train_hash"], data_of(write_rows(tmp_path, 12)).order()["train_hash"]}
    assert len(hashes) == 2


def test_the_first_batches_of_a_sorted_file_are_like_the_others(tmp_path):
    """`trainer.limit_val_batches` reads them alone. Predictions keep the order of the file."""
    rows = "".join(f"{i}\t{'ab'[i >= 40]}\n" for i in range(80))
    data = data_of(write_rows(tmp_path, dev=f"text\tlabel\n{rows}"))
    targets = torch.cat([batch["targets"] for batch in islice(data.val_dataloader(), 20)])
    assert 12 < targets.sum() < 28  # of 40
    (tmp_path / "test.tsv").unlink()
    ids = [id_ for batch in data_of(tmp_path, "predict").predict_dataloader() for id_ in batch["id"]]
    assert ids == [str(i) for i in range(80)]


def test_a_file_that_is_given_to_a_measurement_is_read_whatever_its_name(tmp_path):
    header, *rows = (write_rows(tmp_path) / "dev.tsv").read_text().splitlines()
    (tmp_path / "mine.tsv").write_text("\n".join([header, *rows[:3]]))
    for stage in ("validate", "test", "predict"):
        data = ClassificationDataModule(path=str(tmp_path / "mine.tsv"))
        data.measure_path()
        beside = "test.tsv" if stage != "validate" else "dev.tsv"
        with pytest.warns(UserWarning, match=rf"mine.tsv' itself is read, and not {beside} beside it: give that, or"):
            data.setup(stage)
        (batch,) = getattr(data, f"{stage.replace('validate', 'val')}_dataloader")()
        assert sorted(batch["id"]) == ["0", "1", "2"]
    data = ClassificationDataModule(path=str(tmp_path / "dev.tsv"))
    data.measure_path()
    data.setup("validate")  # nothing to tell
    for name, split in (("dev.tsv", "val"), ("test.tsv", "test")):
        with pytest.raises(InputError, match=rf"{name}' is the {split} file by its name: give the training file"):
            ClassificationDataModule(path=str(tmp_path / name)).setup("fit")


def test_targets_are_asked_for_after_a_prediction_too(tmp_path):
    data = data_of(write_rows(tmp_path, test="text\nx\n"), "predict")
    with pytest.raises(InputError, match=r"the test file in data\.path=.* has no label for row '0'"):
        data.setup("test")


def test_damaged_and_truncated_rows_are_told(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    (tmp_path / "train.tsv").write_text(f"{header}1\t2\t3\t{'long ' * 9}\tb\t0\n4\t5\n6\t7\t8\tc\td\t1\n")
    data = ClassificationDataModule("qqp", path=str(tmp_path), max_length=16)
    data.setup("fit")
    rows = dict(data.describe())
    assert rows["  train"] == (
        "2 rows, 50.0% have the most frequent label, 1 truncated to 16 tokens, 1 damaged rows are left out"
    )
    assert rows["labels"] == "2: 0, 1"
    assert data.val_dataloader() == []  # there is no dev.tsv
    assert rows["  val"] == "no file of this split, so there is no validation"


def test_a_run_without_validation_reads_no_validation_file(tmp_path):
    write_rows(tmp_path, dev="this is no table")
    data = ClassificationDataModule(path=str(tmp_path))
    data.trainer = Trainer(accelerator="cpu", limit_val_batches=0, logger=False, enable_checkpointing=False)
    data.setup("fit")
    assert data.val_dataloader() == []
    assert "  val" not in dict(data.describe())


def test_epochs_that_would_end_before_the_steps_of_a_trainer_are_refused(tmp_path):
    write_rows(tmp_path)
    ends = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "accumulate_grad_batches": 2}
    data = ClassificationDataModule(path=str(tmp_path), batch_size=3)
    for max_epochs in (2, None):
        data.trainer = Trainer(max_epochs=max_epochs, max_steps=4, **ends)
        data.setup("fit")  # 11 rows are 4 batches, 2 steps
    for more in ({"fast_dev_run": True}, {"overfit_batches": 2}):
        data.trainer = Trainer(max_epochs=1, max_steps=4, **ends, **more)
        data.setup("fit")
    data.trainer = Trainer(max_epochs=2, max_steps=5, **ends)
    data.setup("validate")
    with pytest.raises(InputError, match=r"max_epochs=2 ends after 4 steps, and .*=5: set trainer\.max_steps=4"):
        data.setup("fit")


def test_what_is_missing_is_named(tmp_path):
    write_rows(tmp_path, test="text\nx\n")
    (tmp_path / "dev.tsv").unlink()
    assert_input_errors(
        (lambda: data_of(tmp_path, "validate"), "has no dev.tsv: add the file"),
        (lambda: data_of(tmp_path, "test"), "the test file in data.path=.* has no label for row"),
        (lambda: data_of(tmp_path).test_dataloader(), r'the test split is not set up: call setup\("test"\)'),
        (lambda: data_of(write_rows(tmp_path, train="text\tlabel\nx\ta\ny\ta\n")), "has the label 'a' only"),
        (lambda: data_of(write_rows(tmp_path, train="text\tlabel\nx\ta\ny\t \n")), "line 3: the label is empty"),
        (lambda: data_of(write_rows(tmp_path, train="text\tlabel\tlabel\nx\ta\tb\n")), "has 2 columns 'label'"),
        (lambda: data_of(tmp_path / "no"), "does not exist: give the folder with train.tsv"),
        (lambda: data_of(tmp_path, tokenizer="none.json"), "data.tokenizer='none.json' cannot be read"),
        (lambda: ClassificationDataModule("cola", path="x"), "data.dataset='cola' is unknown"),
        (lambda: ClassificationDataModule("sst2"), "data.path is missing: give the folder of data.dataset='sst2'"),
        (lambda: ClassificationDataModule(regression=True).setup("fit"), "data.path is missing"),
        (lambda: ClassificationDataModule(batch_size=0), "data.batch_size=0 must be 1 or more"),
        (lambda: ClassificationDataModule(seed=-1), "data.seed=-1 must be 0 or more"),
        (lambda: ClassificationDataModule(batch_size=2**20), r"data\.max_length · data\.batch_size = 536,870,912"),
        *(
            (lambda one=one: one().setup("fit"), "data.path is missing: give the folder with the files of this task")
            for one in (MultipleChoiceDataModule, QuestionAnsweringDataModule, TokenClassificationDataModule)
        ),
    )


def test_a_row_that_the_tokenizer_cannot_read_is_named(tmp_path):
    (tmp_path / "train.json").write_text('{"A": "a", "B": "b", "C": "c", "label": "B"}\n' * 2)
    (tmp_path / "dev.json").write_text('{"A": "a", "B": "b", "C": "\\ud800", "label": "B"}')
    data = MultipleChoiceDataModule(path=str(tmp_path))
    assert_input_errors((lambda: data.setup("fit"), "row '0' of the val split: the tokenizer cannot read the text"))


def test_predictions_are_of_the_test_file_or_else_of_the_validation_file(tmp_path):
    write_rows(tmp_path, test="id\ttext\nt\tx\n")
    data = data_of(tmp_path, "predict")
    (batch,) = data.predict_dataloader()
    assert batch["id"] == ["t"]
    assert "targets" not in batch
    (tmp_path / "test.tsv").unlink()
    assert sum(len(batch["id"]) for batch in data_of(tmp_path, "predict").predict_dataloader()) == 11
