"""What the measurements of trained models refuse before they start."""

import pytest

from benchmarks.experiments import convergence, copying, decay, passkey, reach
from linrope import LanguageModel, LanguageModelConfig

GATED = {"forget_gate": True}
NO_BYTES = "its tokens must be bytes, with a vocabulary of 257 or more"
MISTAKES = [
    (copying, {}, ["--lengths", "3"], "--lengths 3: must be 4 or more, because half a piece is judged"),
    (copying, {}, ["--lengths", "9000000"], "--lengths 9000000: 64 pieces need more than the text's"),
    (copying, {}, ["--lengths", "8", "--gap", "9000000"], "--lengths 8 with --gap 9000000: 64 pieces need more than"),
    (copying, {}, ["--gap", "-1"], "--gap -1: must be 0 or more"),
    (copying, {}, ["--pieces", "0"], "--pieces 0: must be above 0"),
    (copying, {}, ["--model", "nowhere"], "--model: checkpoint 'nowhere' does not exist"),
    (copying, {"vocab_size": 100}, [], NO_BYTES),
    (copying, {"vocab_size": 300, "tokenizer": {"kind": "unknown"}}, [], NO_BYTES),
    (decay, {}, ["--model", "nowhere"], "--model: checkpoint 'nowhere' does not exist"),
    (decay, {"attention": "softmax"}, [], "none of its layers is linear"),
    (reach, {}, [], "linear layers with a forget gate"),
    (reach, GATED, ["--context", "65536"], "--rows 16 of --context 65536: the text has"),
    (reach, GATED, ["--context", "1"], "--context 1: must be 2 or more"),
    (passkey, None, ["--lengths", "10"], "length=10 is too short"),
    (passkey, None, ["--depths", "101"], "depth=101"),
    (passkey, None, ["--heads", "3"], "n_heads=3 does not divide d_model=64"),
    (passkey, None, ["--seed", "-1"], "data.seed=-1 must be 0 or more"),
    (convergence, None, ["--runs", "nowhere"], "holds no finished run"),
]


@pytest.mark.parametrize(("command", "model", "args", "message"), MISTAKES)
def test_bad_input_is_named(command, model, args, message, tmp_path, capsys):
    if model is not None:
        options = {name: value for name, value in model.items() if name != "tokenizer"}
        saved = LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, **options))
        saved.tokenizer = model.get("tokenizer")
        saved.save_pretrained(tmp_path / "model")
        args = ["--model", str(tmp_path / "model"), *args]
    with pytest.raises(SystemExit) as exit_:
        command.main([*args, "--output", str(tmp_path / "out")])
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
