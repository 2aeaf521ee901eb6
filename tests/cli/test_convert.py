"""`linrope convert`, and the three stages of its configurations."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main
from linrope.evaluation.replacement_costs import replacement_costs
from linrope.models.conversion import convert, hybrid_config
from tests.conftest import write_text_file
from tests.data.tokenizers.subword_files import write_tokenizer
from tests.processes import Run

ROOT = Path(__file__).parents[2]
SIZES = {"d_model": 32, "n_layers": 4, "n_heads": 2, "attention": "softmax"}
RUN = ["--data.path=corpus.txt", "--data.context=64", "--data.batch_size=2", "--trainer.max_steps=2"]
RUN += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=2", "--run.folder=runs"]
LAST = "version_0/checkpoints/last.ckpt"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """With a text, and a softmax model in the folder teacher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    write_text_file(tmp_path)
    torch.manual_seed(0)
    LanguageModel(LanguageModelConfig(**SIZES)).save_pretrained("teacher")
    return tmp_path


def options_of(path: str) -> dict:
    return json.loads(Path(path, "config.json").read_text())


@pytest.mark.exhaustive
def test_three_commands_turn_a_teacher_into_a_trained_hybrid(here, capsys):
    assert main(["convert", "--teacher=teacher", "--window=32", "--output=hybrid"]) == 0
    out, err = capsys.readouterr()
    assert "wrote hybrid: 3 linear layers, 1 softmax (window 32), " in err
    align = shlex.split(out.partition("next  ")[2])
    first = ["fit", "--config", "configs/convert-align.yaml", "--config", "hybrid/model.yaml"]
    assert align[1:] == [*first, "--conversion.teacher", "teacher", "--run.start_from", "hybrid"]
    start = "hybrid"
    for stage in ("align", "distill", "train"):
        files = [f"--config={ROOT / 'configs' / f'convert-{stage}.yaml'}", "--config=hybrid/model.yaml"]
        teacher = [] if stage == "train" else ["--conversion.teacher=teacher"]
        sample = [] if stage == "align" else ["--sample.max_new_tokens=8"]
        assert main(["fit", *files, *RUN, *teacher, *sample, f"--run.start_from={start}"]) == 0
        start = f"runs/convert-{stage}/{LAST}"
        model = LanguageModel.from_pretrained(start)
        assert model.config.to_dict() == {**options_of("hybrid"), "window": 32}
    assert re.search(r"^step 2  val_loss \S+  val_bpb \S+$", capsys.readouterr().out, re.M)
    assert main(["predict", f"--ckpt_path=runs/convert-align/{LAST}", "--output=rows.jsonl"]) == 2
    assert "task='attention_alignment' predicts nothing: `linrope validate` measures" in capsys.readouterr().err


def test_a_window_of_the_teacher_stays(here):
    LanguageModel(LanguageModelConfig(**SIZES, window=16)).save_pretrained("narrow")
    for option, window in (([], 16), (["--window=8"], 8)):
        assert main(["convert", "--teacher=narrow", "--output=hybrid", "--overwrite", *option]) == 0
        assert options_of("hybrid")["window"] == window


def test_shipped_stages_have_one_model_and_follow_each_other():
    configs = {
        stage: yaml.safe_load((ROOT / "configs" / f"convert-{stage}.yaml").read_text())
        for stage in ("align", "distill", "train")
    }
    assert configs["align"]["model"] == configs["distill"]["model"] == configs["train"]["model"]
    for before, after in (("align", "distill"), ("distill", "train")):
        assert configs[after]["run"]["start_from"] == f"runs/{configs[before]['run']['name']}/{LAST}"
    teacher = yaml.safe_load((ROOT / "configs" / "softmax-baseline.yaml").read_text())
    assert configs["align"]["conversion"]["teacher"] == f"runs/{teacher['run']['name']}/{LAST}"
    assert configs["distill"]["conversion"]["teacher"] == configs["align"]["conversion"]["teacher"]
    model = LanguageModelConfig.from_dict(configs["align"]["model"])
    convert(LanguageModelConfig(**teacher["model"]).build(), model)  # raises what differs


def test_the_layers_that_cost_most_stay_softmax(here, capsys):
    measured = ["--keep_softmax=2", "--text=corpus.txt", "--context=64", "--rows=3"]
    assert main(["convert", "--teacher=teacher", "--output=hybrid", *measured]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^ ?([0-3]) +(linear|softmax) +(\d\.\d{4}) +([+-]\d\.\d{4})", out, re.M)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    of_teacher = float(re.search(r"teacher +(\d\.\d{4})", out)[1])
    for _, _, loss, cost in rows:
        assert float(cost) == pytest.approx(float(loss) - of_teacher, abs=2e-4)
    costs = {kind: [float(row[3]) for row in rows if row[1] == kind] for kind in ("softmax", "linear")}
    assert len(costs["softmax"]) == 2
    assert min(costs["softmax"]) >= max(costs["linear"])
    layers = LanguageModel.from_pretrained("hybrid").config.attention_types
    assert layers == [row[1] for row in rows]


def test_a_layer_that_computes_the_same_costs_nothing():
    torch.manual_seed(0)
    teacher = LanguageModelConfig(**SIZES).build().eval()
    tokens = torch.randint(256, (2, 40))
    batches = [{"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}]
    same = convert(teacher, hybrid_config(teacher.config, ["linear", "softmax", "softmax", "softmax"]))
    found = replacement_costs(teacher, same, batches)
    loss = teacher(tokens[:, :-1], targets=tokens[:, 1:]).item() / (2 * 39)
    assert found.unit == "bits per byte"
    assert found.teacher == pytest.approx(loss / 0.6931472, rel=1e-5)
    assert [cost == 0 for cost in found.costs.values()] == [False, True, True, True]
    assert teacher(tokens[:, :-1], targets=tokens[:, 1:]).item() / (2 * 39) == loss  # as it was
    batches[0]["n_bytes"] = torch.zeros(2, 39, dtype=torch.int64)
    assert replacement_costs(teacher, same, batches).unit == "nats per token"
    assert found.costliest(1) == [max(found.costs, key=found.costs.__getitem__)]


@pytest.mark.exhaustive
def test_aligned_layers_are_taken(here, capsys):
    assert main(["convert", "--teacher=teacher", "--layers=linear", "--output=linear"]) == 0
    aligned = LanguageModel.from_pretrained("linear")
    with torch.no_grad():
        for block in aligned.blocks:
            block.attention.qkv.weight.add_(0.01)
    aligned.save_pretrained("aligned")
    args = ["convert", "--teacher=teacher", "--aligned=aligned", "--layers=linear,softmax", "--output=hybrid"]
    assert main(args) == 0
    assert "configs/convert-distill.yaml" in capsys.readouterr().out
    hybrid, teacher = LanguageModel.from_pretrained("hybrid"), LanguageModel.from_pretrained("teacher")
    assert hybrid.config.attention == ["linear", "softmax"]
    for layer, source in enumerate((aligned, teacher, aligned, teacher)):
        weight = source.blocks[layer].attention.qkv.weight
        assert torch.equal(hybrid.blocks[layer].attention.qkv.weight, weight)


def test_a_llama_of_transformers_becomes_a_hybrid(here, error_of, capsys):
    """Its tokenizer too: text of another one is refused, and the hybrid generates."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads)
    transformers.LlamaForCausalLM(config).eval().save_pretrained("llama")
    write_tokenizer(Path("llama"))
    assert main(["convert", "--teacher=llama", "--output=hybrid"]) == 0
    first, second = capsys.readouterr().out.partition("next  ")[2].split("next  ")
    assert first.split()[1:] == ["prepare", "--path", "TEXT", "--tokenizer", "llama", "--output", "prepared"]
    assert shlex.split(second)[-2:] == ["--data.path", "prepared"]
    assert main(["generate", "--ckpt_path=hybrid", "--prompt=for", "--max_new_tokens=3"]) == 0
    options = options_of("hybrid")
    assert options["rope"]["interleaved"] is False
    assert (options["n_kv_heads"], options["attention"]) == (2, ["linear", "linear", "linear", "softmax"])
    files = [f"--config={ROOT / 'configs' / 'convert-distill.yaml'}", "--config=hybrid/model.yaml"]
    options = ["--conversion.teacher=llama", "--run.start_from=hybrid", "--sample.prompt=null"]
    assert "'llama' was trained with the tokenizer tokenizer.json" in error_of("fit", *files, *RUN, *options)
    measured = ["convert", "--teacher=llama", "--output=other", "--keep_softmax=1", "--context=32", "--rows=2"]
    err = " ".join(error_of(*measured).split())
    assert "--text: the built-in text does not serve: --teacher='llama' was trained with the tokenizer" in err
    assert main(["prepare", "--path=corpus.txt", "--tokenizer=llama", "--output=prepared"]) == 0
    assert main([*measured, "--text=prepared"]) == 0
    assert main(["fit", *files, *RUN, *options, "--data.path=prepared"]) == 0
    Path("llama/tokenizer.json").unlink()
    with pytest.warns(UserWarning, match="conversion.teacher='llama' has no tokenizer, so the data cannot"):
        assert main(["fit", *files, *RUN, *options, "--data.path=prepared", "--run.name=unknown"]) == 0
    values = json.loads(Path("llama/config.json").read_text())
    Path("llama/config.json").write_text(json.dumps({**values, "intermediate_size": 96}))
    err = " ".join(error_of("convert", "--teacher=llama", "--output=third").split())
    assert "--teacher='llama': checkpoint 'llama': weights do not fit its configuration" in err
    assert "blocks.0.mlp.gate_up.weight" in err


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["align", "distill"])
def test_two_devices_train_the_stages_that_have_a_teacher(here, stage):
    assert main(["convert", "--teacher=teacher", "--output=hybrid"]) == 0
    files = [f"--config={ROOT / 'configs' / f'convert-{stage}.yaml'}", "--config=hybrid/model.yaml"]
    options = ["--conversion.teacher=teacher", "--run.start_from=hybrid", "--trainer.precision=32-true"]
    devices = ["--trainer.devices=2", f"--trainer.strategy={'ddp' if stage == 'align' else 'fsdp2'}"]
    code, out, err = Run(["fit", *files, *RUN, *options, *devices], here, ranks=2).wait()
    assert code == 0, err
    assert "\nstep 2/2  loss " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher=nowhere"], "--teacher='nowhere': checkpoint 'nowhere' does not exist"),
        (["--teacher=corpus.txt"], "--teacher='corpus.txt': checkpoint 'corpus.txt' is damaged or no checkpoint"),
        (["--layers=linear,linaer"], "--layers=linear,linaer: 'linaer' must be linear or softmax"),
        (["--layers=linear,linear,linear,linear,softmax"], "names 5 layers, and the teacher has 4"),
        (["--layers=linear", "--keep_softmax=1"], "--layers=linear and --keep_softmax=1 exclude each other"),
        (["--keep_softmax=5", "--text=nowhere"], "--keep_softmax=5 must be from 0 to 4"),
        (["--feature_map=hedgehgo"], "Did you mean 'hedgehog'"),
        (["--window=0", "--costs", "--text=nowhere"], "--window=0 must be at least 1"),
        (["--aligned=teacher"], "--aligned='teacher' has attention=softmax: align a model with --layers linear"),
        (["--aligned=other", "--feature_map=elu1"], "--feature_map=elu1 is that of the model of --aligned"),
        (["--aligned=other"], "model.d_model: 32 in the teacher, 16 here"),
        (["--teacher=other"], "the teacher has attention=linear: only softmax layers are converted"),
        (["--costs", "--text=nowhere"], "nowhere"),
        (["--costs", "--rows=0"], "--rows=0 must be at least 1"),
        (["--output=teacher"], "--output='teacher' exists and is not empty"),
    ],
)
def test_what_cannot_be_converted_is_named(here, options, message, error_of):
    LanguageModel(LanguageModelConfig(d_model=16, n_layers=4, n_heads=2)).save_pretrained("other")
    assert message in " ".join(error_of("convert", "--teacher=teacher", "--output=hybrid", *options).split())
    assert not Path("hybrid").exists()
