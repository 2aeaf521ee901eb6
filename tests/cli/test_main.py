"""`linrope`: its commands, their help, and what a mistake on the command line gives."""

import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import linrope
from linrope import feature_maps
from linrope.cli import imports
from linrope.cli.commands import COMMANDS
from linrope.cli.main import main
from linrope.cli.output import command_line

IMPORTS = """
import sys

def require_unloaded(*names):
    found = set(names) & sys.modules.keys()
    assert not found, found

import linrope
require_unloaded("lightning", "lightning_utilities", "jsonargparse", "rich", "torchmetrics", "transformers", "yaml")
import linrope.cli.main
import linrope.data.corpus.opening, linrope.data.prepare.preparation
require_unloaded("lightning", "jsonargparse", "rich", "tokenizers", "zstandard", "datasets")
import linrope.cli.generate, linrope.cli.prepare, linrope.cli.recall, linrope.cli.export, linrope.cli.compare
require_unloaded("lightning", "torchmetrics", "transformers", "tokenizers", "zstandard", "datasets", "matplotlib")
"""


@pytest.mark.exhaustive
def test_a_command_imports_what_it_needs():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_warning_of_linrope_is_one_line_and_others_keep_their_place(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restored afterwards
    assert main(["--version"]) == 0
    ours = Path(linrope.__file__).parent / "training" / "task.py"
    assert warnings.formatwarning("slow \x1b[2J", UserWarning, str(ours), 7) == "linrope: warning: slow \ufffd[2J\n"
    other = warnings.formatwarning("slow", UserWarning, torch.__file__, 7, "code")
    assert other.startswith(f"{torch.__file__}:7: UserWarning: slow\n")


def test_help_is_short_and_names_every_command(capsys):
    assert main(["--help"]) == 0
    assert re.findall(r"^  (\w+)", capsys.readouterr().out, re.M) == list(COMMANDS)
    words = {
        "fit": ["--trainer.max_steps", "--optimizer.lr LR Peak learning rate."],
        "validate": ["--lengths", "1x 4x 16x 64x", "--report"],
        "plan": ["--memory", "24GiB for example: print the longest row that fits", "--measure"],
        "recall": ["--task", "passkey: five digits stated in real text", "--depths", "right before the question"],
    }
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert out.startswith(f"usage: linrope {command} ")
        assert all(word in out for word in words.get(command, []))
        assert "barebones" not in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ft"], r"unknown command 'ft': .* Did you mean 'fit'\?"),
        (["fit", "--model.d_modle=3"], r"unknown option 'model\.d_modle'\. Did you mean 'model\.d_model'\?"),
        (["fit", "--trainer.max_step=3"], r"unknown option 'trainer\.max_step'\. Did you mean 'trainer\.max_steps'\?"),
        (["fit", "--lr=3"], r"unknown option 'lr'\. Did you mean 'optimizer\.lr'\?"),
        (["fit", "--model.d_model=wide"], r"\"model\.d_model\":\n  Expected a <class 'int'>. Got value: wide"),
        (["fit", "--optimizer.name=sgd"], r"optimizer\.name='sgd' is unknown: choose one of 'adamw', 'muon'\."),
        (["fit", "--config={model: {rope: {placement: sined}}}"], r"model\.rope\.placement='sined' is .* 'signed'\?"),
        (["recall", "--ckpt_path=a", "--task=copy"], r"--task='copy' is unknown: choose one of 'passkey', 'induction'"),
        (["fit", "--config=nowhere.yaml"], r"--config .*nowhere\.yaml does not exist\."),
        (["fit", "-c", "nowhere.yaml"], r"--config .*nowhere\.yaml does not exist\."),
        (["prepare", "--path=/nowhere/at/all", "--output=out"], "--path='/nowhere/at/all' does not exist: give a file"),
        (["prepare", "--output=a", "--no_skip_bad_lines", "--workers=x"], r"\"workers\""),
        (["export", "--ckpt=a"], r"unknown option 'ckpt'\. Did you mean 'ckpt_path'\?"),
        (["fit", "--trainer.accelerator=gpuu"], r"section trainer: .*'gpuu'"),
        (["fit", "--trainer.max_epochs=3"], r"trainer\.max_epochs=3 has no meaning here.*\. Set trainer\.max_steps"),
        (["fit", "--run.checkpoint_every_n_steps=0"], r"run\.checkpoint_every_n_steps=0 must be 1 or more"),
        (["fit"], r"a run needs a configuration: `linrope fit --config configs/quickstart\.yaml`"),
        (["fit", "--model.n_layers=1"], r"trainer\.max_steps=-1 must be set to 1 or more"),
        (["fit", "a.yaml"], r"'a\.yaml' has no option before it\. Did you mean '--config a\.yaml'\?"),
        (["plan", "--model.n_layers", "1", "a.yaml"], r"'a\.yaml' has no .* Did you mean '--config a\.yaml'\?"),
        (["fit", "--data.path=/nowhere/at/all"], r"data\.path='/nowhere/at/all' does not exist"),
        (["fit", "--seed_everything=-3"], r"--seed_everything=-3 must be a number from 0 to 4294967295"),
        (["fit", "--trainer.accumulate_grad_batches=0"], r"trainer\.accumulate_grad_batches=0 must be 1 or more"),
        (["plan", "--trainer.accumulate_grad_batches=-1"], r"Set trainer\.accumulate_grad_batches to 1 or more"),
        (["fit", "--sample.prompt=a", "--sample.temperature=-1"], r"temperature=-1\.0 must be a finite number"),
        (["generate", "--ckpt_path=a", "--temperature=-1"], r"temperature=-1\.0 must be a finite number"),
        (["fit", "--data.batch_size=0"], r"data\.batch_size=0 must be 1 or more"),
        (["validate"], r"--ckpt_path is missing: name the checkpoint to validate\."),
        (["generate", "--prompt=a"], "ckpt_path"),
        (["generate", "--ckpt_path=nowhere.ckpt"], r"'nowhere\.ckpt' does not exist"),
        (["validate", "--ckpt_path=nowhere.ckpt", "--translation.n_beams=2"], r"'nowhere\.ckpt' does not exist"),
        (["fit", f"--run.name={'n' * 300}"], r"run\.name='n{40}…' names a folder in run\.folder: give 1 to 200"),
        (["fit", "--run.name=a/../../b"], r"run\.name='a/\.\./\.\./b' names a folder in run\.folder"),
        (["fit", "--run.name="], r"run\.name='' names a folder in run\.folder"),
        (
            ["fit", "--data.batch_size=1000000000"],
            r"data\.context · data\.batch_size = 1,024,000,000,000 tokens",
        ),
        (["fit", "--data.num_workers=1000000000"], r"data\.num_workers=1000000000 must be at most 1024"),
        (["fit", "--model.n_layers=1000000000"], r"n_layers=1000000000 must be at most 10,000"),
        (
            ["fit", "--model.d_model=1000000000"],
            r"the model's weights do not fit into this machine's memory of .* lower",
        ),
        (["fit", f"--model.vocab_size={10**30}"], r"the model's weights do not fit into this machine's memory of .*"),
        (["fit", "--model.short_conv=1000000000"], r"the model's weights do not fit into this machine's memory of .*"),
        (["fit", "--trainer.devices=1000000000"], r"trainer\.devices=1000000000 must be at most 10,000"),
    ],
)
def test_a_mistake_is_one_clean_message_and_exit_code_2(args, message, error_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = error_of(*args)
    assert re.match("linrope: error: .*" + message, err, re.S)
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.ckpt"))


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
"""2 ** 40 values in 40 lines."""


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("model: {d_modle: 3}", r"unknown option 'model\.d_modle'\. Did you mean 'model\.d_model'\?"),
        ("modle: {d_model: 3}", r"unknown option 'modle'\. Did you mean 'model'\?"),
        ("model: {rope: {bse: 3}}", r"unknown option 'model\.rope\.bse'\. Did you mean 'model\.rope\.base'\?"),
        ("model: 3", r"model: 3 must be a section of options"),
        (
            "model:\n  d_model: 16\n  d_model: 32",
            r"--config .*run\.yaml gives model\.d_model twice, in line 2 and in line 3",
        ),
        ("model: {d_model: 3}\nrun: {}\nmodel: {}", r"--config .*run\.yaml gives model twice, in line 1 and in line 3"),
        ("optimizer: {lr: 1}\noptimizer.lr: 2", r"--config .* gives optimizer\.lr twice, in line 1 and in line 2"),
        ("optimizer:\n  lr:", r"optimizer\.lr has no value: give one, or remove the line to keep the default"),
        ("data: {context: null}", r"data\.context has no value"),
        ("trainer: {max_steps: }", r"trainer\.max_steps has no value"),
        ("optimizer:", r"--config .*run\.yaml: section optimizer has no value: give it options"),
        ("# nothing", r"--config .*run\.yaml is empty"),
        (BOMB, r"--config .*run\.yaml stands for more than 20,000 values: remove aliases"),
        ("model: " + "[" * 3000 + "]" * 3000, r"--config .*run\.yaml is nested in more than 50 levels"),
        ("run: &run\n  name: *run", r"--config .*run\.yaml is nested in more than 50 levels, in line 2"),
        ("model: [", r"--config .*run\.yaml, line 1: it is no YAML: expected the node content"),
        ("- model\n- data", r"--config .*run\.yaml is a list or a value: give it sections with options"),
        ("trainer: {max_steps: 2, gradient_clip_val: 1}", r"trainer\.gradient_clip_val=1.* optimizer\.clip_norm=1\.0"),
    ],
)
def test_a_mistake_in_the_yaml_is_named(yaml, message, tmp_path, error_of):
    (tmp_path / "run.yaml").write_text(yaml)
    err = error_of("fit", f"--config={tmp_path / 'run.yaml'}", f"--run.folder={tmp_path / 'runs'}")
    assert re.match("linrope: error: .*" + message, err, re.S)


def test_a_folder_is_no_configuration(tmp_path, error_of):
    assert f"--config {tmp_path} is a folder: name a file of YAML." in error_of("fit", f"--config={tmp_path}")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_configuration_in_another_encoding_is_named(encoding, tmp_path, error_of):
    (tmp_path / "run.yaml").write_text("run: {name: größer}", encoding=encoding)
    err = error_of("fit", f"--config={tmp_path / 'run.yaml'}")
    assert re.fullmatch(r"linrope: error: --config .*run\.yaml is not text in UTF-8: save it in that encoding\.\n", err)


def test_links_that_lead_nowhere_are_named(tiny, tmp_path, error_of):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert f"--config {link} does not exist.\n" in error_of("fit", *tiny, f"--config={link}")
    for folder in (link, link / "runs"):
        err = error_of("fit", *tiny, f"--run.folder={folder}")
        assert "run.folder='" in err
        assert "cannot write there (No such file or directory). Give another folder" in err


def test_a_file_that_is_no_checkpoint_is_named(tmp_path, error_of):
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.ckpt")
    (tmp_path / "folder").mkdir()
    cases = [("generate", name) for name in ("text.ckpt", "foreign.ckpt", "folder", "missing.ckpt")]
    cases += [(command, "foreign.ckpt") for command in ("fit", "validate", "test", "export --output=out")]
    for command, name in cases:
        err = error_of(*command.split(), f"--ckpt_path={tmp_path / name}")
        assert re.match(rf"linrope: error: checkpoint '.*{name}' ", err)


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"linrope {linrope.__version__}\n"


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["linrope", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("linrope", run_name="__main__")
    assert capsys.readouterr().out == f"linrope {linrope.__version__}\n"


@pytest.mark.exhaustive
def test_the_installed_command_exits_with_the_code():
    script = Path(sys.executable).with_name("linrope")
    done = subprocess.run([script, "ft"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("linrope: error: unknown command 'ft'")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error(trained_run, monkeypatch, capsys):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        code = main(["generate", "--prompt=hello", f"--ckpt_path={trained_run.checkpoint}"])
    assert code == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "on_path", "program"),
    [
        ("env/bin/linrope", True, "linrope"),
        ("env/bin/linrope", False, "env/bin/linrope"),
        ("linrope/__main__.py", True, "linrope"),
        ("linrope/__main__.py", False, f"{sys.executable} -m linrope"),
    ],
)
def test_a_line_to_copy_runs_as_it_stands(tmp_path, monkeypatch, typed, on_path, program):
    """In an environment that is not activated the bare name would not be found."""
    monkeypatch.setattr(sys, "argv", [typed])
    (tmp_path / "linrope").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path if on_path else tmp_path / "nothing"))
    assert command_line("generate", ["--prompt", "a b"], "--seed", 1) == f"{program} generate --prompt 'a b' --seed 1"


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """The file my_maps.py, which registers a feature map."""
    file = tmp_path / "my_maps.py"
    file.write_text("import torch\nimport linrope\nlinrope.register_feature_map('cube', lambda x: x.relu() ** 3)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(feature_maps, "_REGISTERED", {})
    yield file
    sys.modules.pop("my_maps", None)
    imports.imported.clear()


def test_code_of_ones_own_is_imported_first(own_code, tiny, run_folder, capsys, error_of):
    args = ["fit", *tiny, "--model.feature_map=cube"]
    assert "'cube' is unknown: choose one of 'elu1'" in error_of(*args)
    assert main([*args, "--import", str(own_code)]) == 0
    assert f"linrope generate --import {own_code} --ckpt_path" in capsys.readouterr().out
    assert "feature_map: cube" in (run_folder / "config.yaml").read_text()
    generate = ["generate", f"--ckpt_path={run_folder}/checkpoints/last.ckpt", "--prompt=a", "--max_new_tokens=2"]
    assert main([*generate, f"--import={own_code}"]) == 0
    feature_maps._REGISTERED.clear()
    assert "--import FILE.py" in error_of(*generate)


def test_code_that_cannot_be_imported_is_named(tmp_path, error_of, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("")
    for source, message in [
        ("nowhere.py", "--import nowhere.py: the file does not exist."),
        ("no_such_module", "--import no_such_module: there is no module of that name"),
        ("", "--import : there is no module of that name"),
        (tmp_path / "json.py", "another module has the name 'json'. Rename the file."),
    ]:
        assert message in error_of("info", "--import", source)
