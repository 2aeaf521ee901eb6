"""Random configurations of `linrope fit`: each is accepted, or refused in seconds by a message that names the place."""

import random
import time

import pytest
import yaml
from lightning.pytorch import Trainer

from linrope.cli.main import main
from linrope.errors import NonFiniteError

OPTIONS = {
    "model": ["attention", "d_model", "n_layers", "n_heads", "vocab_size", "feature_map", "normalize", "short_conv",
              "conv_silu", "forget_gate", "gate_normalizer", "window", "d_ff", "dropout", "norm_eps", "rope",
              "rope_layers", "tie_embeddings"],
    "data": ["path", "context", "batch_size", "fractions", "num_workers", "document_mask", "contiguous", "curriculum",
             "tokenizer", "token_dtype"],
    "optimizer": ["lr", "betas", "weight_decay", "warmup_steps", "clip_norm", "final_lr_fraction",
                  "schedule"],
    "trainer": ["max_steps", "devices", "precision", "val_check_interval", "limit_val_batches", "logger", "max_time",
                "accumulate_grad_batches", "log_every_n_steps", "gradient_clip_val", "enable_checkpointing"],
    "run": ["name", "start_from", "checkpoint_every_n_steps", "ema_decay", "health_every_n_steps", "spike_factor"],
    "sample": ["prompt", "max_new_tokens", "temperature", "top_p", "top_k"],
}  # fmt: skip
VALUES = [None, True, False, -1, 0, 1, 3, 0.5, -1.5, 1e30, 10**9, 10**30, float("nan"), float("inf"), "", "abc"]
VALUES += ["last", "a\nb", "\u202eabc", "../x", [], [1, 2], [None], ["linear", "softmax"], {}, {"base": 3}, {"a": 1}]
ACCEPTED = "would train now"


def base(text_file, folder) -> dict:
    return {
        "model": {"d_model": 16, "n_layers": 1, "n_heads": 2},
        "data": {"path": str(text_file), "context": 32, "batch_size": 2, "num_workers": 0},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 2, "limit_val_batches": 2},
        "run": {"folder": str(folder / "runs"), "name": "tiny"},
    }


def with_other_values(values: dict, draw: random.Random) -> str:
    for _ in range(draw.choice([1, 1, 2, 3])):
        section = draw.choice(list(OPTIONS))
        if draw.random() < 0.05:
            values[section] = draw.choice(VALUES)
        elif isinstance(values.setdefault(section, {}), dict):
            values[section][draw.choice(OPTIONS[section])] = draw.choice(VALUES)
    return yaml.safe_dump(values, allow_unicode=True)


def with_damage(text: str, draw: random.Random) -> str:
    """Characters lost, doubled or exchanged; lines moved."""
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(len(text)), draw.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + draw.choice("\t:{}[]&*!|>%@`'\"#-,\0é\x85") + text[at:]
        elif kind == 2:
            lines = text.splitlines(keepends=True)
            draw.shuffle(lines)
            text = "".join(lines)
        else:
            lines = text.splitlines(keepends=True)
            text = "".join([*lines, draw.choice(lines)])
    return text


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_configurations_are_accepted_or_refused_with_a_message(seed, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def fit(*args, **options):
        raise NonFiniteError(ACCEPTED)  # ends the command with exit code 1

    monkeypatch.setattr(Trainer, "fit", fit)
    draw = random.Random(seed)
    for number in range(12):
        text = with_other_values(base(text_file, tmp_path), draw)
        if number % 3 == 2:
            text = with_damage(text, draw)
        file = tmp_path / "config.yaml"
        file.write_text(text, encoding="utf-8")
        began = time.monotonic()
        try:
            code = main(["fit", "--config", str(file)])
        except BaseException as error:
            raise AssertionError(f"not refused:\n{text}") from error
        out = capsys.readouterr()
        assert time.monotonic() - began < 5, text
        assert code in (1, 2), text
        assert (code == 1) == (f"error: {ACCEPTED}" in out.err), f"{text}\n{out.err}"
        assert "error: " in out.err
        assert "Traceback" not in out.err
