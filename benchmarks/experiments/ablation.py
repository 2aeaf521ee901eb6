"""A grid of training runs, (variant × seed), through the same LightningModule as users' runs.

    python -m benchmarks.ablation --grid benchmarks/grids/placement.yaml

First the training speed of all variants is measured, in turn in one process (but not of those with a curriculum, whose
steps have no one speed); then every run is made, one process at a time. Stop it whenever you like: the same command
goes on where it was, inside a run too, and more seeds or variants may be added to the grid; --only makes the runs of
some variants first. Two commands on one folder share the runs out between them. At the end, and with --report at any
time, it says what was found: means and 95 % intervals over seeds at equal tokens and at equal wall-clock (of a grid of
minutes, at the end of which every schedule ends, at equal wall-clock alone), which differences are noise, stability,
loss by position.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.experiments import ablation_report
from benchmarks.experiments.grid import (
    Grid,
    Settings,
    longest_context,
    n_steps,
    read_grid,
    settings_of,
    text_fingerprint,
)
from benchmarks.experiments.training_run import INTERRUPTED
from benchmarks.harness import report
from benchmarks.harness.timing import Alternation
from linrope import LanguageModel
from linrope.errors import InputError
from linrope.losses import token_losses
from linrope.training import OptimizerConfig
from linrope.training.optimizer import parameter_groups
from linrope.utils.files import claim, whole_file

DRIFT = 0.1
"""A reference whose speed differs by more from what it was is worth a word."""


@dataclass(frozen=True)
class Speed:
    """Of a variant in training, by the median of some rounds."""

    tokens_per_second: float
    spread: float | None = None
    """Between which half of the rounds lie, as a share of the median."""
    machine: str | None = None
    """The processor or GPU that it was measured on: what is faster there may be slower elsewhere."""


class RunFailed(RuntimeError):
    """A run's process ended without a result; the message holds what it said last."""


class Folder:
    """Where a grid's results lie: `runs/VARIANT-seedN.json`, and `speed.json` of the device that they are made on."""

    def __init__(self, path: Path, grid: Grid, settings: dict[str, Settings], device: str = "cpu"):
        self.path, self.grid, self.settings, self.device = path, grid, settings, device
        self.runs = path / "runs"
        self.longest_context = longest_context(settings.values())

    def check(self, runs_follow: bool) -> None:
        """Raise InputError where the folder holds results of another grid, or of another text where `runs_follow`."""
        self.read_speeds()
        for file in sorted(self.runs.glob("*.json")):
            found = read_object(file)
            known = {"variant", "fingerprint", "settings"} <= found.keys()
            if not known or not isinstance(found.get("measured"), dict) or "title" not in found["measured"]:
                raise InputError(f"--output {self.path}: {file} is no result of a grid. Give another folder.")
            variant = found["variant"]
            if found["measured"]["title"] != self.grid.title:
                other = f"those of {found['measured']['title']!r}"
            elif variant in self.settings and not self._matches(found):
                other = f"runs of {variant!r} with other options ({self._difference(found)})"
            elif runs_follow and variant in self.settings and not self._same_text(found):
                other = f"runs of {variant!r} on another text (another version of Python has another standard library)"
            else:
                continue
            raise InputError(
                f"--output {self.path} holds results of another grid: {other}. Nothing there was changed; "
                "give another folder, or name the changed variant anew."
            )

    def _matches(self, found: dict[str, Any]) -> bool:
        own = self.settings[found["variant"]]
        measured = found["measured"] == self.grid.measured and self._validated_on(found) == self.longest_context
        return measured and found["fingerprint"] == own.fingerprint

    def _validated_on(self, found: dict[str, Any]) -> int | None:
        """Of which length the windows were; runs that do not say it had windows of their own."""
        return found.get("longest_context", longest_context([Settings(**found["settings"])]))

    def _same_text(self, found: dict[str, Any]) -> bool:
        return found.get("text") == text_fingerprint(self.settings[found["variant"]])

    def _difference(self, found: dict[str, Any]) -> str:
        then = {**found["measured"], **found["settings"], "longest context": self._validated_on(found)}
        own = asdict(self.settings[found["variant"]])
        now = {**self.grid.measured, **own, "longest context": self.longest_context}
        return ", ".join(f"{name} was {then[name]}" for name in then if then[name] != now.get(name))

    def result_of(self, variant: str, seed: int) -> Path:
        return self.runs / f"{variant}-seed{seed}.json"

    def results(self) -> list[dict[str, Any]]:
        """Every finished run of the grid."""
        files = (self.result_of(*run) for run in self.grid.runs)
        return [read_object(file) for file in files if file.exists()]

    @property
    def missing(self) -> list[tuple[str, int]]:
        return [run for run in self.grid.runs if not self.result_of(*run).exists()]

    def identity(self, variant: str, seed: int) -> dict[str, Any]:
        """What a result says of itself."""
        own = self.settings[variant]
        return {
            "variant": variant,
            "seed": seed,
            "measured": self.grid.measured,
            "fingerprint": own.fingerprint,
            "settings": asdict(own),
            "text": text_fingerprint(own),
            "longest_context": self.longest_context,
            "device": self.device,
            "processor": report.device_name(self.device),
            "commit": report.commit(),
            "torch": torch.__version__,
        }

    def read_speeds(self) -> dict[str, Speed]:
        speeds, keys = self._known_speeds(), self._speed_keys()
        try:
            return {name: Speed(**speeds[key]) for name, key in keys.items() if key in speeds}
        except TypeError as error:
            raise InputError(
                f"--output {self.path}: speed.json holds what is no speed. Move it away, and all are measured again."
            ) from error

    def write_speeds(self, speeds: dict[str, Speed]) -> None:
        """Keep them beside those of variants that this grid does not have: another that shares the folder may."""
        keys = self._speed_keys()
        known = self._known_speeds() | {keys[name]: asdict(speed) for name, speed in speeds.items()}
        with whole_file(self.path / "speed.json") as file:
            file.write((json.dumps(known, indent=1) + "\n").encode())

    @property
    def timed(self) -> Collection[str]:
        """The variants whose steps all take the same time; those of a curriculum do not."""
        return self._speed_keys().keys()

    def _speed_keys(self) -> dict[str, str]:
        timed = {name: own for name, own in self.settings.items() if own.curriculum is None}
        return {name: own.speed_key(self.device) for name, own in timed.items()}

    def _known_speeds(self) -> dict[str, dict[str, Any]]:
        file = self.path / "speed.json"
        return read_object(file) if file.exists() else {}


def read_object(file: Path) -> dict[str, Any]:
    """What a file of JSON in the folder holds.

    Raises:
        InputError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read: {error}. Move it away, and what it held is measured again."
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"{file} is no result of a grid. Move it away, or give another --output.")
    return found


# --- speed -----------------------------------------------------------------------------------------------------------


def training_step(settings: Settings, device: str) -> Any:
    """One optimizer step of the variant's model; what its rows hold does not matter to the time."""
    torch.manual_seed(0)
    model = LanguageModel(settings.model_config).to(device)
    optimizer_config = OptimizerConfig(**settings.optimizer)
    optimizer = torch.optim.AdamW(parameter_groups(model, optimizer_config.weight_decay))
    shape = settings.timed_rows, settings.longest_row + 1
    tokens = torch.randint(settings.model_config.vocab_size, shape, device=device)

    def step() -> None:
        optimizer.zero_grad()
        token_losses(model(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        optimizer.step()

    return step


def measure_speeds(folder: Folder, rounds: int, bar: Progress) -> dict[str, Speed]:
    """How fast every variant trains, measured once for a folder: all in turn, and those that are added later in turn
    with the reference (where that is new too, with one that was measured), by whose speed then and now the hours are
    brought to one. A curriculum has no one speed: its variants are left out."""
    known, timed = folder.read_speeds(), folder.timed
    missing = [name for name in timed if name not in known]
    if not missing:
        return known
    reference = folder.grid.reference
    if reference not in (known or timed):
        reference = [*known, *missing][0]  # what was measured before is the clock then
    found = time_steps(folder, [reference, *missing], rounds, bar)
    if reference in known:
        drift = found[reference].tokens_per_second / known[reference].tokens_per_second
        if abs(drift - 1) > DRIFT:
            bar.console.print(
                f"{reference} trains at {drift:.2f} times its speed when the other variants were measured: the new "
                "ones are counted as if it had not changed",
                highlight=False,
            )
        for name, speed in found.items():
            found[name] = replace(speed, tokens_per_second=speed.tokens_per_second / drift)
    folder.write_speeds(found | known)
    return folder.read_speeds()


def time_steps(folder: Folder, names: list[str], rounds: int, bar: Progress) -> dict[str, Speed]:
    """The speeds of the variants named, steps that are the same measured once, by the first that has them."""
    first = {folder.settings[name].speed_key(folder.device): name for name in reversed(names)}
    settings = {name: folder.settings[name] for name in names if name in first.values()}
    task = bar.add_task("speed", total=(rounds + 1) * len(settings), now="")
    try:
        steps = {name: training_step(own, folder.device) for name, own in settings.items()}
    except RuntimeError as error:
        raise RunFailed(f"no memory for the models of {', '.join(settings)}: {str(error).splitlines()[0]}") from error
    alternation = Alternation(steps, folder.device, count=False)
    alternation.run(rounds, lambda name: bar.update(task, advance=1, now=name))
    bar.remove_task(task)
    if alternation.failures:
        name, error = next(iter(alternation.failures.items()))
        raise RunFailed(f"{name}: a training step failed: {error}") from error
    tokens = {name: own.timed_rows * own.longest_row for name, own in settings.items()}
    machine = report.device_name(folder.device)
    return {
        name: Speed(tokens[name] / found.median, found.spread if rounds > 1 else None, machine)
        for name, found in alternation.samples.items()
    }


# --- runs ------------------------------------------------------------------------------------------------------------


def make_runs(folder: Folder, speeds: dict[str, Speed], only: Collection[str], bar: Progress) -> None:
    """Every run that is missing of the variants named, one process at a time."""
    task = bar.add_task("runs", total=len(folder.grid.runs), completed=len(folder.results()), now="")
    current = bar.add_task("", total=1, now="")
    for variant, seed in folder.missing:
        if variant not in only:
            continue
        speed = speeds[variant].tokens_per_second if variant in speeds else None  # a curriculum counts tokens
        steps = n_steps(folder.grid, folder.settings[variant], speed)
        bar.reset(current, total=steps, description=f"{variant}, seed {seed}")
        with claimed(folder.result_of(variant, seed).with_suffix(".spec")) as spec_file:
            if spec_file is None:
                told = "is being made by another process, and left to it"
            elif folder.result_of(variant, seed).exists():
                told = "was made by another process meanwhile"
            else:
                make_run(folder, variant, seed, steps, lambda **shown: bar.update(current, **shown), spec_file)
                told = ablation_report.in_a_line(json.loads(folder.result_of(variant, seed).read_text()))
        bar.console.print(f"{variant}, seed {seed}: {told}", markup=False, highlight=False)
        bar.update(task, completed=len(folder.results()))


@contextmanager
def claimed(file: Path) -> Iterator[Path | None]:
    """The file, made and held until the end, and then removed; None where another process holds it."""
    with file.open("a") as lock:
        if not claim(lock):
            yield None
            return
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)


def make_run(folder: Folder, variant: str, seed: int, steps: int, show: Any, spec_file: Path) -> None:
    """One run in a process of its own, told in `spec_file` what to do; `show(completed=, now=)` follows it."""
    spec = {
        "identity": folder.identity(variant, seed),
        "steps": steps,
        "result": str(folder.result_of(variant, seed).resolve()),
    }
    spec_file.write_text(json.dumps(spec))
    status, last = run_process(spec_file.resolve(), show)
    if status in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
        raise KeyboardInterrupt
    if status or not folder.result_of(variant, seed).exists():
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "failed"
        raise RunFailed(f"{variant}, seed {seed} {how}:\n" + "\n".join(last))


def run_process(spec_file: Path, show: Any) -> tuple[int, Collection[str]]:
    """The exit status of `benchmarks.training_run`, and the last lines that were no progress: a traceback, if any."""
    command = [sys.executable, "-m", "benchmarks.training_run", str(spec_file)]
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    last = deque(maxlen=20)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(path)},
    )
    try:
        for line in process.stdout:
            if said := _said(line):
                show(**said)
            else:
                last.append(line.rstrip())
        return process.wait(), last
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _said(line: str) -> dict[str, Any] | None:
    """What a run's line of progress shows; None for any other line."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(values, dict):
        return None
    if "step" in values:
        return {"completed": values["step"], "now": f"loss {values['loss']:.3f}"}
    return {"now": values.get("doing", "")}


# --- the command -----------------------------------------------------------------------------------------------------


def parse(args: list[str] | None) -> argparse.Namespace:
    """The options, with the grid and the folder checked before anything runs."""
    parser = argparse.ArgumentParser("benchmarks.ablation", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--grid", type=Path, required=True, help="a YAML file; benchmarks/grids has some, benchmarks/grid.py the form")
    add("--output", type=Path, help="folder for results (default: results/ablation/GRID)")
    add("--only", nargs="+", metavar="VARIANT", help="run these alone, every seed of them (default: all)")
    add("--rounds", type=int, default=5, help="rounds in which the training speeds are measured")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where models are trained and speeds measured")
    add("--report", action="store_true", help="only report what is there")
    options = parser.parse_args(args)
    report.check_positive(parser, options, "rounds")
    report.check_device(parser, options.device)
    options.output = options.output or Path("results/ablation", options.grid.stem)
    try:
        grid = read_grid(options.grid)
        options.folder = Folder(options.output, grid, settings_of(grid), options.device)
        options.folder.check(runs_follow=not options.report)
    except InputError as error:
        parser.error(str(error))
    options.only = options.only or list(grid.variants)
    report.check_names(parser, "--only", options.only, grid.variants)
    if options.report and not options.folder.results():
        parser.error(f"--report: {options.output} holds no finished run of {options.grid}; run it without --report")
    report.make_folder(parser, options.folder.runs)
    return options


def main(args: list[str] | None = None) -> int:
    options = parse(args)
    console, folder = Console(), options.folder
    report.say_if_without_pictures(console)
    interrupted, failure = False, None
    # also where a shell has told its background processes to ignore Ctrl-C: a run must not outlive this process
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    if not options.report:
        try:
            with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
                make_runs(folder, measure_speeds(folder, options.rounds, bar), options.only, bar)
        except KeyboardInterrupt:
            interrupted = True
        except RunFailed as error:
            failure = str(error)
    try:
        if results := folder.results():
            ablation_report.finish(console, folder, results, report.surroundings(options.device, "ablation", args))
    except KeyboardInterrupt:
        interrupted = True
    if failure:
        console.print(failure, markup=False, highlight=False)
        return 1
    if interrupted:
        console.print(f"interrupted: {len(folder.missing)} runs are left; the same command goes on with them")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
