"""`linrope validate`: by position in the row, at other lengths, and what it leaves in a folder."""

import json
import math
import os
import re
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli import validate
from linrope.cli.main import main
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.evaluation import row_lengths
from linrope.evaluation.reports import name_of
from linrope.positions.base import PositionsConfig
from tests.cli.conftest import read_csv


def test_a_validation_says_where_in_the_row_losses_fall(trained_run, tmp_path, capsys):
    (out := tmp_path / "report").mkdir()
    (out / "lengths.png").touch()  # of an earlier report of several lengths
    assert main(["validate", *trained_run.resumed, f"--report={out}"]) == 0
    printed = capsys.readouterr().out
    bpb = float(re.match(r"val_loss \S+  val_bpb (\S+)\n", printed)[1])
    assert re.findall(r"^ +(\d+ … \d+) ", printed, re.M) == ["1 … 16", "17 … 32"]
    assert "other lengths" not in printed
    (whole,) = read_csv(out / "lengths.csv")
    assert (whole["length"], whole["multiple"], whole["rows"], whole["tokens"]) == ("32", "1.0", "32", "1024")
    assert float(whole["bits_per_byte"]) == pytest.approx(bpb, abs=1e-4)
    buckets = read_csv(out / "positions.csv")
    assert [(b["first"], b["last"], b["tokens"]) for b in buckets] == [("1", "16", "512"), ("17", "32", "512")]
    # no separator stands in one document, so the mean over buckets of one size is that of the whole
    assert sum(float(b["bits_per_byte"]) for b in buckets) / 2 == pytest.approx(bpb, abs=1e-4)
    contents = json.loads((out / "lengths.json").read_text())
    assert contents["command"].startswith("linrope validate --model.d_model=16")
    assert contents["checkpoint"] == str(trained_run.checkpoint)
    assert (out / "positions.png").read_bytes()[:4] == b"\x89PNG"
    assert not (out / "lengths.png").exists()


def test_a_measurement_says_which_text_it_read(trained_run, tmp_path, capsys):
    (own := tmp_path / "own.txt").write_text("abc " * 100)
    corpus = trained_run.folder.parents[2] / "corpus.txt"
    n_bytes = corpus.stat().st_size - round(0.95 * corpus.stat().st_size)
    for options, told in (
        ([], f"measured on the test split of {corpus}: {n_bytes:,} bytes in 1 document"),
        ([f"--data.test_path={own}", "--data.path=/nowhere"], f"measured on {own}: 400 bytes in 1 document"),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*held out here")
            assert main(["test", *trained_run.resumed, *options]) == 0
        assert told in capsys.readouterr().err


def test_longer_rows_are_read_in_pieces_of_the_same_text(trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(row_lengths, "SEGMENT", 100)
    args = ["validate", *trained_run.resumed, f"--report={tmp_path}", "--report_tokens=300"]
    assert main([*args, "--lengths", "1x", "4x", "512"]) == 0
    printed = capsys.readouterr().out
    table = re.findall(r"^ +(\d+) +(\d+)× +(\d+) ", printed, re.M)
    assert table == [("32", "1", "16"), ("128", "4", "4"), ("512", "16", "1")]
    model = LanguageModel.from_pretrained(trained_run.checkpoint)
    corpus = (trained_run.folder.parents[2] / "corpus.txt").read_bytes()
    start = round(0.9 * len(corpus))  # where a single file's validation split begins
    text = torch.tensor(list(corpus[start : start + 513]))
    for row in read_csv(tmp_path / "lengths.csv"):
        with torch.no_grad():
            logits = model(text[:-1].view(-1, int(row["length"])))
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[1:]).item()
        assert float(row["bits_per_byte"]) == pytest.approx(nats / 0.6931472, rel=1e-5)  # float32 sums, reordered


@pytest.mark.exhaustive
def test_segments_and_packed_documents_have_positions_too(trained_run, tmp_path, capsys):
    rows = []
    for more in ([], ["--segment_length=10"], ["--data.document_mask=true"]):
        assert main(["validate", *trained_run.resumed, *more, f"--report={tmp_path / 'report'}"]) == 0
        rows.append([float(b["bits_per_byte"]) for b in read_csv(tmp_path / "report" / "positions.csv")])
    assert rows[1] == pytest.approx(rows[0], rel=1e-5)  # float32 sums in another order
    assert rows[2] == pytest.approx(rows[0], rel=1e-5)  # there is one document


def test_a_folder_of_save_pretrained_is_validated_like_its_checkpoint(trained_run, tmp_path, capsys, error_of):
    LanguageModel.from_pretrained(trained_run.checkpoint).save_pretrained(tmp_path / "saved")
    folder = ["validate", *trained_run.options, f"--ckpt_path={tmp_path / 'saved'}"]
    printed = []
    for args in (["validate", *trained_run.resumed], folder):
        assert main(args) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "model.n_heads: 2 in the checkpoint, 4 here" in error_of(*folder, "--model.n_heads=4")


def test_the_checkpoint_names_the_model_and_its_run_the_data(trained_run, tmp_path, capsys, error_of, monkeypatch):
    """Without a configuration, and with one that leaves the model out."""
    assert main(["validate", *trained_run.resumed]) == 0
    expected = capsys.readouterr().out
    checkpoint = f"--ckpt_path={trained_run.checkpoint}"
    assert main(["validate", checkpoint]) == 0
    assert capsys.readouterr().out == expected
    data = [option for option in trained_run.options if not option.startswith("--model.")]
    saved = tmp_path / "saved"
    LanguageModel.from_pretrained(trained_run.checkpoint).save_pretrained(saved)
    (tmp_path / "data.yaml").write_text("model: {n_layers: 1}")
    for args in ([f"--ckpt_path={saved}"], [checkpoint, f"--config={tmp_path / 'data.yaml'}"]):
        assert main(["validate", *data, *args]) == 0
        assert capsys.readouterr().out == expected
    assert "model.n_heads: 2 in the checkpoint, 4 here" in error_of("validate", checkpoint, "--model.n_heads=4")
    assert main(["test", checkpoint]) == 0
    assert re.match(r"test_loss 5\.\d+", capsys.readouterr().out)


def test_overlapping_test_rows_predict_each_token_once(trained_run, capsys, error_of):
    """As bits per character of enwik8 are reported: against a loop over the tokens of the split."""
    assert main(["test", *trained_run.resumed, "--data.test_stride=20"]) == 0
    printed = capsys.readouterr().out
    assert "predicted once, after 12 others or more, as far as its text has them (data.test_stride=20)" in printed
    model = LanguageModel.from_pretrained(trained_run.checkpoint)
    corpus = (trained_run.folder.parents[2] / "corpus.txt").read_bytes()
    text = torch.tensor([*corpus[round(0.95 * len(corpus)) :], SEPARATOR])
    nats, predicted, start = 0.0, 0, 0
    while predicted < len(text) - 1:
        start = min(start, len(text) - 33)
        with torch.no_grad():
            logits = model(text[None, start : start + 32])[0]
        new = slice(predicted - start, 32)
        nats += F.cross_entropy(logits[new], text[start + 1 : start + 33][new], reduction="sum").item()
        predicted, start = start + 32, start + 20
    assert predicted == len(text) - 1
    loss, bpb = re.match(r"test_loss (\S+)  test_bpb (\S+)\n", printed).groups()
    assert float(loss) == pytest.approx(nats / predicted, abs=1e-4)
    assert float(bpb) == pytest.approx(nats / (predicted - 1) / math.log(2), abs=1e-4)  # the separator is no byte
    assert "data.test_stride=33 must be from 1 to data.context=32" in error_of(
        "test", *trained_run.resumed, "--data.test_stride=33"
    )


def test_last_is_the_newest_checkpoint_of_all_runs(trained_run, tmp_path, capsys, error_of, monkeypatch):
    monkeypatch.chdir(trained_run.folder.parents[2])
    assert main(["validate", "--ckpt_path=last"]) == 0
    err = capsys.readouterr().err
    assert "--ckpt_path=last is runs/tiny/version_0/checkpoints/last.ckpt\n" in err
    assert "batches were read" not in err
    assert "no run in 'runs/other' has a last.ckpt" in error_of("validate", "--ckpt_path=last", "--run.name=other")
    assert main(["generate", "--ckpt_path=last", "--prompt=hello", "--max_new_tokens=2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("hello")
    assert "--ckpt_path=last is runs/tiny/version_0/checkpoints/last.ckpt\n" in err
    monkeypatch.chdir(tmp_path)
    for command in ("generate", "validate"):
        assert "no run in 'runs' has a last.ckpt. Name the checkpoint file" in error_of(command, "--ckpt_path=last")
    shutil.copytree(trained_run.folder, tmp_path / "runs" / "old" / "version_0")
    newer = shutil.copytree(trained_run.folder, tmp_path / "runs" / "group" / "new" / "version_0")
    os.utime(newer / "checkpoints" / "last.ckpt")
    assert main(["generate", "--ckpt_path=last", "--prompt=a", "--max_new_tokens=1"]) == 0
    assert "--ckpt_path=last is runs/group/new/version_0/checkpoints/last.ckpt\n" in capsys.readouterr().err


def test_mistakes_are_named_before_work_starts(trained_run, capsys):
    for more, message in [
        (["--lengths", "1x", "soon"], "--lengths soon: give numbers of tokens, or multiples of data.context=32"),
        (["--lengths", "64x"], "--lengths: 2048 tokens are more than the validation split has"),
        (["--report_tokens=0"], "--report_tokens=0 must be 1 or more"),
        (["--trainer.limit_val_batches=0"], "trainer.limit_val_batches=0 leaves nothing to read: set it to 1.0"),
        (["--report=/dev/null/x"], "--report='/dev/null/x': cannot write there"),
    ]:
        assert main(["validate", *trained_run.resumed, *more]) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert "val_loss" not in out


def test_a_length_beyond_the_table_of_positions_is_named_before_the_validation(trained_run, tmp_path, capsys):
    positions = PositionsConfig("learned", length=32)
    model = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, positions=positions))
    model.save_pretrained(tmp_path / "learned")
    args = ["validate", *trained_run.options, f"--ckpt_path={tmp_path / 'learned'}", "--lengths", "1x", "4x"]
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert "--lengths=128 is longer than the rows of model.positions.length=32" in err
    assert "val_loss" not in out


def test_a_part_of_the_split_is_named(trained_run, capsys):
    for command, split in (("validate", "val"), ("test", "test")):
        assert main([command, *trained_run.resumed, f"--trainer.limit_{split}_batches=3"]) == 0
        said = rf"3 of 16 batches were read: trainer\.limit_{split}_batches=1\.0 reads the whole split\n"
        assert re.search(said, capsys.readouterr().err)


def test_a_picture_does_not_take_the_context_of_the_validation_for_that_of_training(
    trained_run, tmp_path, capsys, monkeypatch
):
    titles = []
    monkeypatch.setattr(validate, "write_lengths", lambda *args: titles.append(args[-1]) or [])
    assert main(["validate", *trained_run.resumed, "--data.context=64", f"--report={tmp_path}"]) == 0
    assert titles == [f"{name_of(trained_run.checkpoint)}, data.context=64"]


def test_titles_tell_checkpoints_apart():
    assert name_of("ablation/long/runs/recall-seed0.model") == "recall-seed0"
    assert name_of("runs/lm-long/version_0/checkpoints/last.ckpt") == "lm-long/version_0, last"
    assert name_of("last.ckpt") == "last"


def test_a_checkpoint_without_its_run_says_that_the_data_are_not_known(trained_run, tmp_path, capsys):
    moved = shutil.copy(trained_run.checkpoint, tmp_path / "moved.ckpt")
    here = [option for option in trained_run.resumed if not option.startswith("--ckpt_path")]
    assert main(["validate", *here, f"--ckpt_path={moved}"]) == 0
    said = f"{moved} has no config.yaml of its run beside it: the model is its own, the data and all else are defaults"
    assert said in capsys.readouterr().err
