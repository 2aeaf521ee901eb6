"""The checkpoint that a command line names: its model, its device, and the configuration of its run."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from linrope.cli.config_files import config_files, values_of
from linrope.cli.output import say_once
from linrope.errors import InputError, suggest_file
from linrope.interop.roformer import is_roformer, load_roformer
from linrope.models.language_model import LanguageModel
from linrope.models.saving import is_checkpoint, open_checkpoint, read_model
from linrope.utils.files import in_newest_version

LANGUAGE_MODELING = "language_modeling"
"""The task of a run whose configuration names none."""
RUNS = "runs"
"""Folder of all runs, unless `run.folder` names another."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, and where it runs."""

    ckpt_path: str
    """Checkpoint file, or a folder that save_pretrained or `linrope export` wrote; last: the newest last.ckpt in
    runs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a CUDA GPU if there is one."""

    @cached_property
    def checkpoint(self) -> str:
        """The path that `ckpt_path` names."""
        return named_checkpoint(self.ckpt_path)

    def load(self) -> LanguageModel:
        """The model in evaluation mode. InputError: no such model, or no such device."""
        model = LanguageModel.from_pretrained(self.checkpoint)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device=cuda is not available on this machine: choose auto or cpu.")
        return model.to("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu").eval()


def named_checkpoint(ckpt_path: str) -> str:
    """The path that --ckpt_path names; that of "last", the newest last.ckpt of all runs, is printed."""
    return _newest(RUNS) if ckpt_path == "last" else ckpt_path


def _newest(folder: str, run: str | None = None) -> str:
    """The last.ckpt of the newest run with a name in `folder`, or that of all its runs that was written last; it is
    printed. InputError if there is none."""
    runs, last = Path(folder, run or ""), "checkpoints/last.ckpt"
    if run is not None:
        newest = in_newest_version(runs, last)
    else:
        found = glob.iglob(f"**/version_*/{last}", root_dir=runs, recursive=True)  # follows links
        paths = (runs / name for name in found)
        newest = max((path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise InputError(f"--ckpt_path=last: no run in {str(runs)!r} has a last.ckpt. Name the checkpoint file.")
    say_once(f"--ckpt_path=last is {newest}")
    return str(newest)


def with_run_config(args: Sequence[str]) -> list[str]:
    """The command line of a measurement, with what its checkpoint knows before the user's own options.

    Without --config that is the config.yaml of the checkpoint's run, if there is one; otherwise the model's options.
    InputError for a checkpoint that is missing.
    """
    args, given = list(args), values_of(args, "--ckpt_path")
    if not given or {"-h", "--help"} & set(args):
        return args
    path, has_config = given[-1], bool(config_files(args))
    if path == "last" and not has_config:  # with a configuration it is the last of that run
        folders, names = values_of(args, "--run.folder"), values_of(args, "--run.name")
        path = _newest((folders or [RUNS])[-1], (names or [None])[-1])
        args += ["--ckpt_path", path]
    elif path in ("last", "null"):
        return args
    if not Path(path).exists():  # said here: without its configuration the parser would refuse options of its task
        raise InputError(f"checkpoint {path!r} does not exist.{suggest_file(Path(path))}")
    folder = Path(path).absolute().parent
    of_run = folder.parent / "config.yaml"
    if not has_config and folder.name == "checkpoints" and of_run.is_file():
        say_once(f"the configuration is {of_run}, and the options given here")
        return ["--config", str(of_run), *args]
    if is_checkpoint(path):
        saved = open_checkpoint(path)["linrope"]
        values = {"task": saved["task"], "model": saved["config"]}
    else:
        values = {"model": load_roformer(path).config.to_dict() if is_roformer(path) else read_model(Path(path)).config}
    if not has_config:
        task = "" if "task" in values else "the task (--task), "
        say_once(
            f"{path} has no config.yaml of its run beside it: the model is its own, {task}the data and all else are "
            "defaults unless given here, --data.path for one."
        )
    return ["--config", json.dumps(values), *args]
