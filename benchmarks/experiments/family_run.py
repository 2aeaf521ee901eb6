"""One run of `benchmarks.family`, in a process of its own: training, then a test; the result is a JSON file.

    python -m benchmarks.family_run SPEC.json

The file has the fields of `Spec`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from linrope.cli import fit
from linrope.cli.checkpoint import with_run_config
from linrope.cli.plan import PlanOptions, first_step
from linrope.cli.training import CheckpointOptions, ConfigCLI, TrainingCLI
from linrope.evaluation.run_curves import Log, find_log, read_log
from linrope.models.base import ModelConfig, load_model
from linrope.utils.files import versions, whole_file


@dataclass(frozen=True)
class Spec:
    """What to run, and where."""

    variant: str
    seed: int
    config: str
    """A YAML file of `linrope fit`."""
    options: dict[str, Any]
    """Options of `linrope fit` by name, in place of those of `config`."""
    start_from: str | None
    """The `folder` of another run, whose last weights this one starts from."""
    test: bool
    """Measure the last checkpoint on the test split too."""
    folder: str
    """Of the run: the folder that `linrope fit` makes its own in."""
    result: str
    """The file to write."""
    data: str | None
    """A hash of the data; None where the options name no file or folder, and for a glob."""

    @property
    def recorded(self) -> dict[str, Any]:
        """What decides the result: the options but for where the data lies, the configuration file, the data."""
        options = {name: value for name, value in self.options.items() if name != "data.path"}
        configuration = yaml.safe_load(Path(self.config).read_text(encoding="utf-8"))
        return {"options": options, "configuration": configuration, "data": self.data}


def arguments_of(options: dict[str, Any]) -> list[str]:
    """Options on a command line; values are written as YAML."""
    written = {name: yaml.safe_dump(value, default_flow_style=True, width=10**9) for name, value in options.items()}
    return [text for name, value in written.items() for text in (f"--{name}", value.removesuffix("...\n").strip())]


def curve_of(log: Log) -> list[dict[str, float]]:
    """The validations: the step and the metrics of each."""
    rows = ({name: row[name] for name in row if name == "step" or name.startswith("val_")} for row in log)
    return [row for row in rows if len(row) > 1]


def last_checkpoint(folder: Path) -> str:
    """Of the newest run in a folder of `linrope fit`."""
    found = versions(folder)
    return str(found[max(found)] / "checkpoints" / "last.ckpt")


def configured(spec: Spec) -> ConfigCLI:
    """The run's command line, parsed. InputError for an option that is unknown or does not fit."""
    return ConfigCLI("plan", ["--config", spec.config, *arguments_of(spec.options)], PlanOptions)


def training_step(spec: Spec) -> Callable[[], None]:
    """One optimizer step of a run, on its first batch, again and again."""
    cli = configured(spec)
    task, batch, autocast = first_step(cli)
    optimizer = cli.config_init.optimizer.optimizer_of(task.model, fused=True)

    def step() -> None:
        for _ in range(cli.config_init.trainer.accumulate_grad_batches):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = task.batch_loss(batch)
            (loss.total / loss.n_positions).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    recorded = spec.recorded  # before hours in which the configuration may be edited
    folder = Path(spec.folder)
    where = {"run.folder": str(folder.parent), "run.name": folder.name}
    if spec.start_from is not None:
        where["run.start_from"] = last_checkpoint(Path(spec.start_from))
    fit.run(["--config", spec.config, *arguments_of({**spec.options, **where})])
    checkpoint, scores = last_checkpoint(folder), {}
    if spec.test:
        cli = TrainingCLI("test", with_run_config(["--ckpt_path", checkpoint]), CheckpointOptions)
        cli.run(verbose=False)
        scores = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    result = {
        "variant": spec.variant,
        "seed": spec.seed,
        **recorded,
        "parameters": load_model(checkpoint, ModelConfig).n_parameters,
        "curve": curve_of(read_log(find_log(spec.folder))),
        "test": scores,
    }
    with whole_file(Path(spec.result)) as file:
        file.write(json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
