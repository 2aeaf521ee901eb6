"""The commands on text of any tokenizer: bits per byte, models that keep their tokenizer, tokens without one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.data.corpus.opening import open_text
from linrope.data.prepare.config import PrepareConfig
from linrope.data.prepare.preparation import prepare
from linrope.data.tokenizers.subwords import SubwordTokenizer
from linrope.errors import InputError
from linrope.training import LanguageModelingModule
from tests.cli.conftest import read_csv
from tests.data.tokenizers.subword_files import byte_level, write_tokenizer

VOCAB = 300  # of byte_level()


@pytest.fixture
def last(run_folder) -> Path:
    """The checkpoint of the first run."""
    return run_folder / "checkpoints" / "last.ckpt"


def test_a_tokenizers_run_from_text_to_text(subwords, tiny, run_folder, last, tmp_path, capsys):
    options = [*tiny, f"--data.path={subwords}", f"--model.vocab_size={VOCAB}", "--trainer.limit_val_batches=1.0"]
    assert main(["fit", *options, "--sample.prompt=the ", "--trainer.log_every_n_steps=1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^tokenizer +tokenizer\.json *$", out, re.M)
    assert re.search(r"^  train +[\d,]+ tokens, [\d,.]+ (MB|bytes) in \d+ documents *$", out, re.M)
    assert "\nthe " in out

    # bits per byte: the nats of all targets of the validation over the bytes of the text that they stand for
    model, windows = LanguageModel.from_pretrained(last), []
    tokenizer, nats, n_bytes = SubwordTokenizer(byte_level()), 0.0, 0
    val = open_text(subwords, [0.9, 0.05, 0.05]).corpora["val"]
    for start in range(0, (len(val) - 1) // 32 * 32, 32):
        windows.append(val.tokens(start, start + 33))
        nats += F.cross_entropy(model(windows[-1][None, :-1])[0], windows[-1][1:], reduction="sum").item()
        n_bytes += len(tokenizer.decoder().feed(windows[-1][1:]).encode())
    capsys.readouterr()
    assert main(["validate", *options, f"--ckpt_path={last}"]) == 0
    loss, bpb = map(float, re.match(r"val_loss (\S+)  val_bpb (\S+)\n", capsys.readouterr().out).groups())
    assert loss == pytest.approx(nats / (32 * len(windows)), abs=1e-4)  # four digits are printed
    assert bpb == pytest.approx(nats / math.log(2) / n_bytes, abs=1e-4)
    train = [row for row in read_csv(run_folder / "metrics.csv") if row["train_loss"]]
    assert all(0 < float(row["train_bpb"]) < float(row["train_loss"]) / math.log(2) for row in train)

    # the checkpoint carries the tokenizer, and so does a folder made of it
    assert model.tokenizer == {"kind": "tokenizers", "json": (tmp_path / "tokenizer.json").read_text()}
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()
    written = []
    for path in (last, tmp_path / "saved"):
        assert main(["generate", f"--ckpt_path={path}", "--max_new_tokens=1"]) == 0  # of no prompt at all
        capsys.readouterr()
        assert main(["generate", f"--ckpt_path={path}", "--prompt=the naïve", "--max_new_tokens=9", "--seed=1"]) == 0
        written.append(capsys.readouterr().out)
    prompt = tokenizer.encode_prompt("the naïve")[None]
    tokens = model.generate(prompt, 9, temperature=0.8, seed=1)[0, prompt.shape[1] :].tolist()
    tokens = tokens[: tokens.index(tokenizer.separator)] if tokenizer.separator in tokens else tokens
    decoder = tokenizer.decoder()
    text = decoder.feed(tokens) + decoder.finish()
    assert written[0] == written[1]
    assert re.sub("[^\n -~ -\U0010ffff]", "\ufffd", "the naïve" + text) + "\n" == written[0]
    module = LanguageModelingModule.load_from_checkpoint(last, weights_only=True)
    assert module.model.tokenizer == model.tokenizer
    assert torch.equal(module.eval()(prompt), model(prompt))


def test_another_tokenizer_than_the_checkpoints_is_refused(texts, subwords, tiny, last, tmp_path, error_of):
    tiny = [*tiny, f"--model.vocab_size={VOCAB}"]
    assert main(["fit", *tiny, f"--data.path={subwords}"]) == 0
    other = write_tokenizer(tmp_path, byte_level(vocab_size=299), "other.json")
    prepare(PrepareConfig(path=str(texts), output=str(tmp_path / "out"), tokenizer=str(other), workers=1))
    tiny += [f"--ckpt_path={last}"]
    resume = ["fit", *tiny, "--trainer.max_steps=4"]
    for args, path in ((["validate", *tiny], texts), (["test", *tiny], tmp_path / "out"), (resume, tmp_path / "out")):
        err = error_of(*args, f"--data.path={path}")
        assert f"checkpoint '{last}' was trained with the tokenizer tokenizer.json (300 tokens" in err
    assert main([*resume, f"--data.path={subwords}"]) == 0


def test_a_model_that_knows_too_few_tokens_is_refused(subwords, tiny, trained_run, error_of):
    for n, args in ((299, ["fit", *tiny, "--model.vocab_size=299"]), (257, ["validate", *trained_run.resumed])):
        err = error_of(*args, f"--data.path={subwords}")
        assert re.search(rf"model\.vocab_size={n} is too small .*tokenizer of .*subwords.*: set it to 300 or more", err)
    err = error_of("fit", *tiny, "--model.vocab_size=256")
    assert "model.vocab_size=256 is too small for the text (bytes and a separator): set it to 257" in err


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    tokens = np.random.default_rng(1).integers(0, VOCAB - 1, 5000)
    tokens[1234] = VOCAB - 1
    tokens.astype("<u2").tofile(tmp_path / "flat.bin")
    return tmp_path / "flat.bin"


def test_a_flat_file_trains_without_a_tokenizer_and_then_has_no_text(
    flat, tiny, run_folder, last, tmp_path, capsys, error_of
):
    options = [*tiny, f"--data.path={flat}", f"--model.vocab_size={VOCAB}", "--trainer.log_every_n_steps=1"]
    assert main(["fit", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^tokenizer +unknown *$", out, re.M)
    assert re.search(r"^  train +4,500 tokens *$", out, re.M)
    assert re.search(r"^step 2/2  loss \d\.\d+  [\d,]+ tok/s", out, re.M)
    assert re.search(r"^step 2  val_loss \d\.\d+$", out, re.M)
    assert "bpb" not in out + (run_folder / "metrics.csv").read_text()
    assert "linrope generate" not in out
    assert "nan" not in (run_folder / "metrics.csv").read_text()
    assert (run_folder / "checkpoints" / "best.ckpt").is_file()
    LanguageModel.from_pretrained(last).save_pretrained(tmp_path / "saved")
    for path in (last, tmp_path / "saved"):
        err = error_of("generate", f"--ckpt_path={path}")
        assert "prompt needs a tokenizer, and the model was trained on tokens without one" in err
    assert "sample.prompt needs a tokenizer" in error_of("fit", *options, "--sample.prompt=a")

    # with a tokenizer the same checkpoint is measured in bits per byte too
    validate = ["validate", *options, f"--ckpt_path={last}"]
    assert main([*validate, f"--data.tokenizer={write_tokenizer(tmp_path)}"]) == 0
    assert re.match(r"val_loss (\S+)  val_bpb (\S+)\n", capsys.readouterr().out)
    assert main(validate) == 0
    assert "byte counts are unknown: set data.tokenizer" in capsys.readouterr().out
    validate += [f"--report={tmp_path / 'report'}"]
    for option, asked in (("--report", []), ("--lengths", ["--lengths", "2x"])):
        assert f"{option} counts bits per byte" in error_of(*validate, *asked)
    assert not (tmp_path / "report").exists()


def test_a_flat_files_token_beyond_the_model_is_named_with_its_position(flat, tiny, tmp_path, error_of):
    err = error_of("fit", *tiny, f"--data.path={flat}")
    assert f"model.vocab_size=257 is too small for the text ({flat} holds 299 at position 1,234): set it to 300" in err
    small = write_tokenizer(tmp_path, byte_level(vocab_size=299))
    err = error_of("fit", *tiny, f"--data.path={flat}", f"--data.tokenizer={small}")
    assert "holds 299 at position 1,234, where tokens are below 299" in err
    assert "data.token_dtype='int8' is unknown" in error_of("fit", *tiny, "--data.token_dtype=int8")


def test_a_folder_of_a_model_without_a_word_on_tokenizers_is_one_of_bytes(tmp_path, capsys, error_of):
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2}
    LanguageModel(LanguageModelConfig(**sizes)).save_pretrained(tmp_path / "saved")
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["SHA256SUMS", "config.json", "model.pt"]
    assert "tokenizer" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert main(["generate", f"--ckpt_path={tmp_path / 'saved'}", "--prompt=hé", "--max_new_tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("hé")
    LanguageModel(LanguageModelConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "small")
    err = error_of("generate", f"--ckpt_path={tmp_path / 'small'}", "--prompt=a")
    assert "this one knows 64 tokens, the tokenizer bytes has 257" in err


def test_a_lost_tokenizer_of_a_folder_is_named(tmp_path):
    model = LanguageModel(LanguageModelConfig(vocab_size=VOCAB, d_model=16, n_layers=1, n_heads=2))
    model.tokenizer = SubwordTokenizer(byte_level()).to_serialized()
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"saved/tokenizer\.json' is missing, SHA256SUMS lists it: save or copy"):
        LanguageModel.from_pretrained(tmp_path / "saved")
    with pytest.raises(InputError, match=r"saved/tokenizer\.json cannot be read .*: save the model again"):
        LanguageModel.from_pretrained(tmp_path / "saved", verify=False)
