"""Translation from the command line: trained, resumed, measured, averaged; its loss and its translations."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import sacrebleu
import torch

from linrope.cli.main import main
from linrope.data.tokenizers.base import tokenizer_from_serialized
from linrope.errors import InputError
from linrope.evaluation.translation_scores import translation_scores
from linrope.generation.beam_search import beam_search
from linrope.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from linrope.training.data_modules.translation import TranslationDataModule
from linrope.training.tasks.translation import TranslationConfig, TranslationModule

ENGLISH = ["the red house", "a blue dog runs", "he sees the dog", "the house is blue", "she runs", "a dog sees a house"]
GERMAN = ["das rote Haus", "ein blauer Hund rennt", "er sieht den Hund", "das Haus ist blau", "sie rennt"]
GERMAN += ["ein Hund sieht ein Haus"]
OPTIONS = ["--task=translation", "--model.vocab_size=330", "--model.d_model=32", "--model.n_heads=2"]
OPTIONS += ["--model.n_encoder_layers=1", "--model.n_decoder_layers=1", "--data.vocab_size=330", "--data.max_length=32"]
OPTIONS += ["--data.tokens_per_batch=32", "--optimizer.lr=1e-2", "--optimizer.warmup_steps=5"]
OPTIONS += ["--trainer.accelerator=cpu", "--trainer.val_check_interval=10", "--trainer.log_every_n_steps=1"]


@pytest.fixture
def options(tmp_path, monkeypatch) -> list[str]:
    """A small text, which is also that of validation and test."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    Path("text").mkdir()
    for split in ("train", "val", "test"):
        for language, lines in (("en", ENGLISH), ("de", GERMAN)):
            Path(f"text/{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return [*OPTIONS, "--data.path=text", "--run.name=mt"]


def checkpoint(name: str = "mt", file: str = "last.ckpt") -> str:
    return f"runs/{name}/version_0/checkpoints/{file}"


def metrics_of(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+) (\d+\.\d+)", line)}


@pytest.mark.exhaustive
def test_it_learns_a_text_and_bleu_and_chrf_are_those_of_the_predictions(options, capsys):
    assert (
        main(["fit", *options, "--model.dropout=0", "--trainer.max_steps=120", "--trainer.val_check_interval=40"]) == 0
    )
    out = capsys.readouterr().out
    n_batches = int(re.search(r"6 pairs in (\d) batches", out)[1])
    assert n_batches > 1
    losses = [float(loss) for loss in re.findall(r"val_loss (\S+)", out)]
    assert losses[-1] < 0.3 * losses[0]
    again = [f"--ckpt_path={checkpoint()}"]
    for beams in (1, 3):  # may differ from those of the run
        found = [*again, f"--translation.n_beams={beams}"]
        capsys.readouterr()
        assert main(["test", *found]) == 0
        metrics = metrics_of(capsys.readouterr().out)
        assert main(["predict", *found, "--output=found.jsonl", "--overwrite"]) == 0
        rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
        assert [row["source"] for row in rows] == ENGLISH
        translations = [row["translation"] for row in rows]
        assert metrics["test_bleu"] == pytest.approx(sacrebleu.corpus_bleu(translations, [GERMAN]).score, abs=1e-4)
        assert metrics["test_chrf"] == pytest.approx(sacrebleu.corpus_chrf(translations, [GERMAN]).score, abs=1e-4)
        assert sum(map(str.__eq__, translations, GERMAN)) >= 5
        assert metrics["test_loss"] == pytest.approx(losses[-1], abs=1e-4)
    assert main(["fit", *options, "--trainer.max_epochs=3", "--run.name=epochs"]) == 0
    assert torch.load(checkpoint("epochs"), weights_only=True)["global_step"] == 3 * n_batches


def test_losses_are_means_over_target_tokens_smoothed_in_training_only(options):
    data = TranslationDataModule("text", vocab_size=330, max_length=32, tokens_per_batch=64)
    data.setup("fit")
    sizes = {"d_model": 16, "n_encoder_layers": 1, "n_decoder_layers": 1, "n_heads": 2, "dropout": 0.0}
    task = TranslationModule(
        EncoderDecoderConfig(vocab_size=330, **sizes), translation=TranslationConfig(label_smoothing=0.2)
    )
    task.trainer = type("Trainer", (), {"testing": False})()
    batch = next(iter(data.train_dataloader()))
    nats, smoothed, right, n = 0.0, 0.0, 0, 0
    for row, inputs in enumerate(batch["inputs"]):
        source = inputs[batch["source_mask"][row]][None]
        kept = batch["targets"][row] != -100
        log_p = task.model(source, batch["decoder_inputs"][row, kept][None])[0].log_softmax(-1).double()
        for t, target in enumerate(batch["targets"][row, kept].tolist()):
            nats -= log_p[t, target].item()
            smoothed -= 0.8 * log_p[t, target].item() + 0.2 * log_p[t].mean().item()
            right += log_p[t].argmax().item() == target
            n += 1
    loss = task.batch_loss(batch)
    assert loss.total.item() == pytest.approx(smoothed, rel=1e-5)
    assert (loss.n_targets.item(), loss.n_positions) == (n, 64)
    sums = {}
    task.evaluate(batch, sums)
    task.evaluate(batch, sums)  # of two batches
    metrics = task.evaluation_metrics("val", sums)
    assert metrics == pytest.approx({"val_loss": nats / n, "val_accuracy": right / n}, rel=1e-5)


@pytest.mark.exhaustive
def test_a_resumed_run_ends_with_the_weights_of_a_whole_one(options, monkeypatch):
    options = [*options, "--trainer.max_steps=7", "--model.dropout=0.2"]  # more than two epochs
    assert main(["fit", *options]) == 0

    def interrupt(self, *unused) -> None:
        if self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TranslationModule, "on_train_batch_end", interrupt)
        assert main(["fit", *options, "--run.name=parts"]) == 128 + signal.SIGINT
    assert main(["fit", *options, "--run.name=parts", f"--ckpt_path={checkpoint('parts')}"]) == 0
    whole, parts = (EncoderDecoder.from_pretrained(checkpoint(name)).state_dict() for name in ("mt", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


@pytest.mark.exhaustive
def test_the_mean_of_checkpoints_is_measured_and_translates(options, capsys):
    kept = ["--run.checkpoint_every_n_steps=2", "--run.keep_checkpoints=2"]
    assert main(["fit", *options, *kept, "--trainer.max_steps=6"]) == 0
    files = [checkpoint(file=f"step_{step}.ckpt") for step in (4, 6)]
    assert main(["average", *files, "--output=averaged"]) == 0
    config = "--config=runs/mt/version_0/config.yaml"
    capsys.readouterr()
    assert main(["validate", config, "--ckpt_path=averaged"]) == 0
    assert "val_accuracy" in capsys.readouterr().out
    assert main(["predict", config, "--ckpt_path=averaged", "--output=found.jsonl"]) == 0
    assert main(["predict", config, f"--ckpt_path={files[1]}", "--output=last.jsonl"]) == 0
    model = EncoderDecoder.from_pretrained("averaged")
    tokenizer = tokenizer_from_serialized(model.tokenizer)
    rows = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert model.translate(ENGLISH) == [row["translation"] for row in rows]
    Path("text").rename("old")  # a new text needs neither the training text nor references
    Path("text").mkdir()
    Path("old/test.en").rename("text/test.en")
    for path, text in (("averaged", Path("found.jsonl").read_text()), (files[1], Path("last.jsonl").read_text())):
        assert main(["predict", config, f"--ckpt_path={path}", "--output=new.jsonl", "--overwrite"]) == 0
        assert Path("new.jsonl").read_text() == text
    with pytest.raises(InputError, match=r"texts has 1: pass a list of texts"):
        model.translate([1])
    assert main(["test", "--ckpt_path=averaged"]) == 2
    assert "For a model of another task name it: --task translation" in " ".join(capsys.readouterr().err.split())
    for row in rows:  # without padding
        tokens = [*tokenizer.encode_batch([row["source"]])[0], 2]
        (found,) = beam_search(model, torch.tensor([tokens]), begin=1, end=2, max_new_tokens=len(tokens) + 50)
        decoder = tokenizer.decoder()
        expected = decoder.feed([token for token in found.tokens.tolist() if token > 2]) + decoder.finish()
        assert row["translation"] == expected.strip()


def test_scores_of_a_whole_text():
    texts = ["the cat sat on the mat today", "a dog ran over the long road"]
    assert translation_scores(texts, texts) == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert translation_scores([], []) == {"bleu": 0.0, "chrf": 0.0}


def test_a_test_without_sacrebleu_stops_before_it_starts(options, capsys, monkeypatch):
    assert main(["fit", *options, "--trainer.max_steps=1"]) == 0
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setattr(TranslationModule, "evaluate", None)
    assert main(["test", f"--ckpt_path={checkpoint()}"]) == 2
    assert "needs the package sacrebleu, which is not installed: pip install 'linrope[translation]'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--model.vocab_size=300", "model.vocab_size=300 is too small for the tokenizer"),
        ("--translation.label_smoothing=1", "translation.label_smoothing=1.0 must be at least 0 and below 1"),
        ("--translation.n_beams=0", "translation.n_beams=0 must be 1 or more"),
        ("--translation.length_penalty=-1", "translation.length_penalty=-1.0"),
        ("--translation.extra_tokens=-1", "translation.extra_tokens=-1"),
        ("--translation.beams=3", "unknown option 'translation.beams'"),
        ("--data.target=fr", "train.fr cannot be read"),
        (
            "--model.positions.name=learned --model.positions.length=20",
            "data.max_length=32 is longer than the rows of model.positions.length=20",
        ),
        ("--sample.prompt=a", "unknown option 'sample.prompt'"),
    ],
)
def test_what_does_not_fit_is_named(options, changed, message, capsys):
    for command in ("fit", "plan"):
        assert main([command, *options, "--trainer.max_steps=2", *changed.split()]) == 2
        assert message in capsys.readouterr().err
