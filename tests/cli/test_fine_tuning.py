"""The shipped configs of fine-tuning train two steps, on data that the tests make where they need some."""

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from linrope import EncoderConfig
from linrope.cli.main import main
from linrope.interop.roformer import export_roformer
from linrope.models.base import load_model
from tests.conftest import covering, write_text_file

ROOT = Path(__file__).parents[2]
SMALL = ["--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2", "--trainer.max_epochs=-1"]
SMALL += ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=2"]
SMALL += ["--trainer.accelerator=cpu", "--data.batch_size=4"]


def test_the_config_of_classification_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", f"--config={ROOT / 'configs' / 'finetune-classification.yaml'}", *SMALL]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "excerpts of 5 lines of the Python standard library" in out
    assert re.search(r"step 2 val_loss 1\.\d+ val_accuracy 0\.\d+ val_f1 0\.\d+", out)
    assert Path("runs/finetune-classification/version_0/checkpoints/best.ckpt").is_file()


def test_all_epochs_that_are_done_leave_nothing_to_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    Path("rows/train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    options = ["--task=classification", "--data.path=rows", "--data.batch_size=1", "--trainer.accelerator=cpu"]
    options += ["--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2", "--trainer.max_epochs=2"]
    assert main(["fit", *options]) == 0
    for epochs in (2, 1):
        capsys.readouterr()
        assert main(["fit", *options, f"--trainer.max_epochs={epochs}", "--ckpt_path=last"]) == 0
        out, err = capsys.readouterr()
        assert re.search(rf"trainer\.max_epochs={epochs} is already done: .* is at step 4\. To train on, raise it", err)
        assert out == ""


def write_mrpc(folder: Path) -> None:
    folder.mkdir()
    rows = [f"{i % 2}\t{i}\t{i}\tthe first said {i % 3}\tthe other {i % 5} said" for i in range(9)]
    for name in ("train", "dev"):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows]
        (folder / f"{name}.tsv").write_text("\n".join(lines), encoding="utf-8-sig")
    lines = ["index\t#1 ID\t#2 ID\t#1 String\t#2 String", *(f"{i}{row[1:]}" for i, row in enumerate(rows[:3]))]
    (folder / "test.tsv").write_text("\n".join(lines))


def write_trained_roformer(folder: Path) -> int:
    """A softmax encoder in transformers' folder, with a WordPiece tokenizer; the size of its vocabulary."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "first", "other", "said", *"01234"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:5])
    sizes = {"vocab_size": len(words), "d_model": 16, "n_layers": 1, "n_heads": 2}
    torch.manual_seed(0)
    export_roformer(EncoderConfig(**sizes, attention="softmax", head="masked_lm").build(), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(words)


@pytest.mark.parametrize("attention", covering(["softmax", "linear"], ["linear"]))
def test_the_config_of_glue_starts_from_a_roformer(tmp_path, monkeypatch, capsys, attention):
    monkeypatch.chdir(tmp_path)
    write_mrpc(tmp_path / "MRPC")
    vocab_size = write_trained_roformer(tmp_path / "roformer")
    small = [*SMALL, f"--model.vocab_size={vocab_size}", f"--model.attention={attention}"]
    assert main(["fit", f"--config={ROOT / 'configs' / 'glue-mrpc.yaml'}", *small]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "weights of roformer" in out
    assert "model.head: 'classification' is new" in out
    assert ("model.attention: 'softmax' in the checkpoint, 'linear' here" in out) == (attention == "linear")
    assert re.search(r"step 2 val_loss 0\.\d+ val_accuracy 0\.\d+ val_f1 0\.\d+", out)
    last = "runs/glue-mrpc/version_0/checkpoints/last.ckpt"
    assert main(["predict", f"--ckpt_path={last}", "--output=found.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert [(row["id"], row["label"] in ("0", "1")) for row in rows] == [(str(i), True) for i in range(3)]
    assert main(["export", f"--ckpt_path={last}", "--output=exported"]) == 0
    data = ["--data.dataset=mrpc", "--data.path=MRPC", "--data.tokenizer=roformer/tokenizer.json"]
    again = ["--task=classification", "--ckpt_path=exported", "--output=again.jsonl", "--trainer.accelerator=cpu"]
    assert main(["predict", *again, *data]) == 0
    scores = [json.loads(line)["scores"] for line in Path("again.jsonl").read_text().splitlines()]
    assert scores == [pytest.approx(row["scores"], abs=1e-6) for row in rows]


def test_the_config_of_cail_starts_from_a_roformer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("CAIL2019-SCM").mkdir()
    rows = [{"A": "the first", "B": f"other {i % 5}", "C": "said", "label": "BC"[i % 2]} for i in range(9)]
    for name in ("train", "valid", "test"):
        Path(f"CAIL2019-SCM/{name}.json").write_text("\n".join(map(json.dumps, rows)))
    small = [*SMALL, f"--model.vocab_size={write_trained_roformer(tmp_path / 'roformer')}"]
    assert main(["fit", f"--config={ROOT / 'configs' / 'cail-scm.yaml'}", *small]) == 0
    assert re.search(r"^step 2  val_loss 0\.\d+  val_accuracy [01]\.\d+$", capsys.readouterr().out, re.M)


def test_masked_lm_on_bytes_is_a_start_and_a_run_needs_no_validation_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = ["--trainer.accelerator=cpu", "--model.d_model=16", "--model.n_layers=1", "--model.n_heads=2"]
    text = [f"--data.path={write_text_file(tmp_path)}", "--data.context=32", "--trainer.limit_val_batches=1"]
    assert main(["fit", "--task=masked_lm", *sizes, *text, "--trainer.max_steps=1", "--run.name=mlm"]) == 0
    Path("rows").mkdir()
    Path("rows/train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    start = "runs/mlm/version_0/checkpoints/last.ckpt"
    options = ["--task=classification", "--data.path=rows", "--trainer.max_epochs=2", f"--run.start_from={start}"]
    capsys.readouterr()
    assert main(["fit", *sizes, *options, "--optimizer.lr=0"]) == 0
    assert "model.head: 'classification' is new" in " ".join(capsys.readouterr().out.split())
    paths = start, "runs/default/version_0/checkpoints/last.ckpt"
    trained, tuned = (load_model(path, EncoderConfig) for path in paths)
    torch.testing.assert_close(tuned.encoder.state_dict(), trained.encoder.state_dict(), rtol=0, atol=0)
