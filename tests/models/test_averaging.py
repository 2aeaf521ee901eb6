"""The mean of the weights of several models, from Python and from the command line."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from linrope import InputError, LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.models.averaging import average_weights
from linrope.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

CONFIG = LanguageModelConfig(vocab_size=30, d_model=8, n_layers=1, n_heads=2)
PAIR = {"vocab_size": 13, "d_model": 8, "n_encoder_layers": 1, "n_decoder_layers": 1, "n_heads": 2}


def saved(folder, *configs, dtype=torch.float32):
    paths = []
    for number, config in enumerate(configs):
        torch.manual_seed(number)
        config.build().to(dtype).save_pretrained(folder / str(number))
        paths.append(folder / str(number))
    return paths


def test_each_weight_is_the_mean(tmp_path):
    paths = saved(tmp_path, *[EncoderDecoderConfig(**PAIR)] * 3)
    models = [EncoderDecoder.from_pretrained(path).state_dict() for path in paths]
    found = average_weights(paths)
    assert found.keys() == models[0].keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        mean = sum(model[name].double() for model in models) / 3
        torch.testing.assert_close(weight.double(), mean, rtol=6e-8, atol=0)  # one rounding to float32
    assert not found["embedding.weight"].equal(models[0]["embedding.weight"])
    (alone,) = saved(tmp_path / "half", CONFIG, dtype=torch.bfloat16)
    assert average_weights([alone])["embedding.weight"].dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_a_new_process_knows_every_kind_of_model(tmp_path):
    paths = saved(tmp_path, *[EncoderDecoderConfig(**PAIR)] * 2)
    command = [sys.executable, "-m", "linrope", "average", *map(str, paths), "--output", str(tmp_path / "averaged")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(
        EncoderDecoder.from_pretrained(tmp_path / "averaged").state_dict(), average_weights(paths)
    )


def test_what_differs_is_named(tmp_path):
    wider = dataclasses.replace(CONFIG, n_heads=4, short_conv=3)
    first, other, pair = saved(tmp_path, CONFIG, wider, EncoderDecoderConfig(**PAIR))
    with pytest.raises(InputError, match=r"(?s)0' and .*1' differ.*model\.n_heads: 2 and 4\n.*model\.short_conv: \d"):
        average_weights([first, other])
    with pytest.raises(InputError, match="LanguageModel and EncoderDecoder"):
        average_weights([first, pair])
    (half,) = saved(tmp_path / "half", CONFIG, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"embedding\.weight: torch\.float32 and torch\.bfloat16"):
        average_weights([first, half])
    model = LanguageModel.from_pretrained(first)
    model.tokenizer = {"kind": "bytes"}
    model.save_pretrained(tmp_path / "bytes")
    with pytest.raises(InputError, match="their tokenizers"):
        average_weights([first, tmp_path / "bytes"])
    model.tokenizer, model.labels = None, ["no", "yes"]
    model.save_pretrained(tmp_path / "labels")
    with pytest.raises(InputError, match=r"their labels: None and \['no', 'yes'\]"):
        average_weights([first, tmp_path / "labels"])
    for paths in ([], str(first)):
        with pytest.raises(InputError, match="list of at least one checkpoint"):
            average_weights(paths)
    with pytest.raises(InputError, match="nowhere"):
        average_weights([first, tmp_path / "nowhere"])


def test_a_run_keeps_its_newest_checkpoints_and_the_command_averages_them(tiny, run_folder, tmp_path, capsys):
    every = ["--run.checkpoint_every_n_steps=2", "--run.keep_checkpoints=2", "--trainer.max_steps=7"]
    assert main(["fit", *tiny, *every]) == 0
    folder = run_folder / "checkpoints"
    kept = [folder / f"step_{step}.ckpt" for step in (6, 7)]
    assert sorted(file.name for file in folder.iterdir()) == ["best.ckpt", "last.ckpt", "step_6.ckpt", "step_7.ckpt"]
    assert [torch.load(file, weights_only=True)["global_step"] for file in kept] == [6, 7]
    output = tmp_path / "averaged"
    command = ["average", *map(str, kept), f"--output={output}"]
    assert main(command) == 0
    assert "the mean of 2 checkpoints" in capsys.readouterr().err
    averaged, *models = (LanguageModel.from_pretrained(path).state_dict() for path in (output, *kept))
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, (models[0][name] + models[1][name]) / 2)
    assert main(command) == 2
    assert "is not empty: choose another, or pass --overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert main(["fit", *tiny, "--run.keep_checkpoints=-1"]) == 2
    assert "run.keep_checkpoints=-1 must be 0 (none) or more" in capsys.readouterr().err
