"""A grid of `linrope fit` runs of any task, (variant × seed): what is learned at equal tokens and at equal time.

    python -m benchmarks.family --grid benchmarks/grids/family/masked_lm.yaml --data enwik8

Each run is a process; with --jobs 2 there are two at a time, each with half of the threads. The same command goes on
with a grid that was stopped: finished runs are kept. With --speeds it measures the training speeds, for the comparison
at equal time. `benchmarks.ablation` does more for language models: it reads rows of other lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.experiments import family_report as report
from benchmarks.experiments.family_run import Spec, configured, training_step
from benchmarks.experiments.grid import hash_of_files
from benchmarks.experiments.results_folder import RunFailed, claimed
from benchmarks.harness.options import check_names
from benchmarks.harness.pictures import Figure
from benchmarks.harness.runner import AddOption, Benchmark, print_table
from benchmarks.harness.timing import Alternation
from linrope.errors import InputError
from linrope.evaluation.reports import write_json
from linrope.models.base import differences
from linrope.utils.options import check_keys, check_types

ROOT = Path(__file__).parents[2]
START_FROM = "start_from"


@dataclass(frozen=True)
class FamilyGrid:
    """Variants of one configuration of `linrope fit`, and what to report of them."""

    title: str
    question: str
    """What the grid is to answer."""
    config: str
    """A YAML file of `linrope fit`, seen from the repository's root."""
    metric: str
    """The metric of validation that decides, such as val_loss; lower is better."""
    label: str
    """Its name and unit, for tables and pictures."""
    reference: str
    """The variant from which differences are taken."""
    variants: dict[str, Any]
    """By name, options of `linrope fit` such as `{model.rope: null}`; `start_from` is a variant above, from whose run
    of the same seed it starts."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of all variants."""
    scores: list[str] = field(default_factory=list)
    """Metrics of `linrope test` to report, such as test_bleu; none makes no test."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    pictures: dict[str, Any] = field(default_factory=dict)
    """Titles and variants of the pictures, by the ending of their names; without any there is one, of the six best."""

    def __post_init__(self) -> None:
        check_types(self)
        for ending, picture in self.pictures.items():
            if not (isinstance(picture, list) and len(picture) == 2 and isinstance(picture[1], list)):
                raise InputError(f"pictures: {ending!r} is {picture!r}: give its title and a list of variants.")
        for name, options in self.variants.items():
            if not isinstance(options, dict | None):
                raise InputError(f"variants: {name} is {options!r}: give its options by name, or nothing.")
        for title, variants in self.pictures.values():
            if unknown := [name for name in variants if name not in self.variants]:
                raise InputError(f"pictures: {title!r} shows {', '.join(unknown)}, which is no variant.")
        earlier: list[str] = []
        for name, options in self.variants.items():
            start = (options or {}).get(START_FROM)
            if start is not None and start not in earlier:
                raise InputError(f"variants: {name} starts from {start!r}, which is no variant above it.")
            earlier.append(name)
        if self.reference not in self.variants:
            raise InputError(f"reference={self.reference!r} is no variant: choose one of {', '.join(self.variants)}.")

    @classmethod
    def read(cls, file: Path) -> FamilyGrid:
        """Raises InputError, which names the file, if it is no grid."""
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
            check_keys(values, cls)
            return cls(**values)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, InputError) as error:
            raise InputError(f"--grid {file}: {error}") from error


class Family(Benchmark):
    """`processes` are those of the runs that are being made."""

    name = "family"
    point = report.Row
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--grid", type=Path, required=True, help="a YAML file, such as those in benchmarks/grids/family")
        add("--data", type=Path, help="data.path of all runs: a file or folder (default: that of the configuration)")
        add("--output", type=Path, help="folder for results (default: results/family/GRID)")
        add("--only", nargs="+", metavar="VARIANT", help="make the runs of these variants alone (default: all)")
        add("--jobs", type=int, default=1, help="runs at a time (default: 1)")
        add("--report", action="store_true", help="report the finished runs, and run nothing")
        speeds = "measure the training speed of every variant in turn, with nothing else running; make no runs"
        add("--speeds", action="store_true", help=speeds)
        add("--rounds", type=int, default=9, help="rounds in which the speeds are measured (default: 9)")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`plan` is added, and `hashes`."""
        options.output = options.output or Path("results/family", options.grid.stem)
        options.plan = FamilyGrid.read(options.grid)
        options.only = options.only or list(options.plan.variants)
        check_names(parser, "--only", options.only, options.plan.variants)
        if options.data is not None and not options.data.exists():
            parser.error(f"--data {options.data} does not exist: give the file or folder to train on")
        options.hashes = {}
        run = cls(options)
        if not options.report:
            run.require_options()
        run.refuse_other_results()
        if not options.report:
            run.require_starts()

    @property
    def folder(self) -> Path:
        """Of the runs' results."""
        return self.options.output / "runs"

    @property
    def grid(self) -> FamilyGrid:
        return self.options.plan

    @property
    def specs(self) -> list[Spec]:
        return [self.spec_of(variant, seed) for seed in self.grid.seeds for variant in self.grid.variants]

    def spec_of(self, variant: str, seed: int) -> Spec:
        options = {**self.grid.options, **(self.grid.variants[variant] or {})}
        start = options.pop(START_FROM, None)
        if self.options.data is not None:
            options["data.path"] = str(self.options.data)
        options |= {"seed_everything": seed, "data.seed": seed}
        result = self.folder / f"{variant}-seed{seed}.json"
        start = None if start is None else self.runs_of(start, seed)
        config = str(ROOT / self.grid.config)
        folder, test = self.runs_of(variant, seed), bool(self.grid.scores)
        return Spec(variant, seed, config, options, start, test, folder, str(result), self.options.hashes.get(variant))

    def runs_of(self, variant: str, seed: int) -> str:
        """Where `linrope fit` writes."""
        return str(self.options.output / "fits" / f"{variant}-seed{seed}")

    def require_options(self) -> None:
        """Raise InputError for a variant with options that `linrope fit` does not take. `options.hashes` is filled:
        those of the variants' data."""
        known: dict[str, str | None] = {}
        for spec in (spec for spec in self.specs if spec.seed == self.grid.seeds[0]):
            try:
                path = configured(spec).config.data.get("path")
            except InputError as error:
                raise InputError(f"variants: {spec.variant}: {error}") from error
            if path not in known:
                known[path] = hash_of_files(Path(path)) if path is not None and Path(path).exists() else None
            self.options.hashes[spec.variant] = known[path]

    def refuse_other_results(self) -> None:
        """Raise InputError for results of another grid, of another configuration, of other data (where they lie may
        differ), or without the grid's metric or scores."""
        for spec in self.specs:
            if not (file := Path(spec.result)).exists():
                continue
            found, own = json.loads(file.read_text()), spec.recorded
            report.require_metrics(found, self.grid.metric, self.grid.scores)
            differing = list(differences(found["options"], own["options"]))
            if found.get("configuration", own["configuration"]) != own["configuration"]:
                differing.append(self.grid.config)
            if None not in (found.get("data"), own["data"]) and found["data"] != own["data"]:
                differing.append("text at data.path")
            if differing:
                raise InputError(
                    f"--output {self.options.output} holds a run of {spec.variant!r} with another "
                    f"{', '.join(differing)}: give another folder, or another name to the changed variant."
                )

    @property
    def waiting(self) -> list[Spec]:
        """The runs to make."""
        return [s for s in self.specs if s.variant in self.options.only and not Path(s.result).exists()]

    def require_starts(self) -> None:
        """Raise InputError for a run that starts from one that is neither finished nor among those to make."""
        made = {spec.folder for spec in self.specs if Path(spec.result).exists()}
        there = made | {spec.folder for spec in self.waiting}
        for spec in self.waiting:
            if spec.start_from is not None and spec.start_from not in there:
                start = self.grid.variants[spec.variant][START_FROM]
                raise InputError(f"--only {spec.variant}: it starts from {start}, which has no result: add {start}.")

    def measure(self) -> None:
        self.processes = []
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting = self.waiting
        try:
            if self.options.speeds:
                write_json(self.options.output / report.SPEEDS, self.measured_speeds())
            elif waiting and not self.options.report:
                self.make_runs(waiting)
        except RunFailed as error:
            self.failure = str(error)
        finally:  # after Ctrl-C too: the table of the finished runs is written anew
            self.read(self.options.output)

    def measured_speeds(self) -> dict[str, float]:
        """Seconds of an optimizer step of each variant: the median of the rounds."""
        specs = [spec for spec in self.specs if spec.seed == self.grid.seeds[0]]
        steps = {spec.variant: training_step(spec) for spec in specs}
        tick = self.progress("speeds", (self.options.rounds + 1) * len(steps))
        alternation = Alternation(steps, count=False)
        alternation.run(self.options.rounds, lambda name: tick(advance=1, description=f"speed of {name}"))
        for name, error in alternation.failures.items():
            raise InputError(f"--speeds: a training step of {name!r} failed: {error}") from error
        return {name: sample.median for name, sample in alternation.samples.items()}

    def make_runs(self, waiting: list[Spec]) -> None:
        """Make the runs, `--jobs` at a time; one that starts from another waits for it. After one that fails, those
        that are being made go on to their end.

        Raises:
            RunFailed: one failed.
        """
        total = len(self.grid.seeds) * len(self.grid.variants)
        tick, failed = self.progress("runs", total), []
        with ThreadPoolExecutor(self.options.jobs) as pool:
            running: dict[Future, Spec] = {}
            try:
                while waiting or running:
                    tick(completed=len(list(self.folder.glob("*.json"))))
                    unfinished = {spec.folder for spec in [*waiting, *running.values()]}
                    ready = [spec for spec in waiting if spec.start_from not in unfinished]
                    for spec in ready[: self.options.jobs - len(running)]:
                        waiting.remove(spec)
                        running[pool.submit(self.make_run, spec)] = spec
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        spec = running.pop(future)
                        try:
                            said = f"{spec.variant}, seed {spec.seed}: {future.result()}"
                        except RunFailed as error:
                            failed.append(str(error))
                            waiting = []
                            continue
                        self.console.print(said, markup=False, highlight=False)
                if failed:
                    raise RunFailed("\n".join(failed))
            except BaseException:
                for process in self.processes:
                    process.terminate()
                raise
        tick(completed=len(list(self.folder.glob("*.json"))))

    def make_run(self, spec: Spec) -> str:
        """One run in a process of its own, unless another process makes it. Returns what is to be said of it."""
        with claimed(Path(spec.result).with_suffix(".spec")) as file:
            if file is None:
                return "another process is making it"
            if spec.start_from not in {None, *(one.folder for one in self.specs if Path(one.result).exists())}:
                return "another process is making the run that it starts from: give the command again after that"
            if not Path(spec.result).exists():
                self.run_process(spec, file)
            result = json.loads(Path(spec.result).read_text())
            try:
                report.require_metrics(result, self.grid.metric, self.grid.scores)
            except InputError as error:
                raise RunFailed(str(error)) from error
            return f"{result['curve'][-1][self.grid.metric]:.4f} {self.grid.label}"

    def run_process(self, spec: Spec, file: Path) -> None:
        file.write_text(json.dumps(asdict(spec)))
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = str(max(1, torch.get_num_threads() // self.options.jobs))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": threads}
        with open(file.with_suffix(".log"), "w+") as log:
            command = [sys.executable, "-m", "benchmarks.family_run", str(file)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
            self.processes.append(process)
            status = process.wait()
            self.processes.remove(process)
            log.seek(0)
            last = log.read().splitlines()[-20:]
        if status or not Path(spec.result).exists():
            raise RunFailed(f"{spec.variant}, seed {spec.seed} failed:\n" + "\n".join(last))

    def read(self, folder: Path) -> None:
        """Read the finished runs, and make the rows of the table."""
        results = [json.loads(file.read_text()) for file in sorted((folder / "runs").glob("*.json"))]
        results = [run for run in results if report.has_metrics(run, self.grid.metric, self.grid.scores)]
        self.runs = report.by_variant(results, list(self.grid.variants))
        speeds = json.loads(file.read_text()) if (file := folder / report.SPEEDS).exists() else {}
        self.points = report.rows_of(self.runs, speeds, self.grid.reference, self.grid.metric, self.grid.scores)

    def show(self) -> None:
        if self.points:
            names = self.points, self.grid.title, self.grid.label, self.grid.reference
            print_table(self.console, report.table_of(*names), [])
            if (in_time := report.table_at_equal_time(*names)) is not None:
                print_table(self.console, in_time, [])

    @property
    def kept(self) -> str:
        return "finished runs are kept; the same command continues with the others"

    def details(self) -> dict[str, Any]:
        return {"title": self.grid.title, "question": self.grid.question, "reference": self.grid.reference}

    def figures(self) -> dict[str, Figure]:
        grid, finished = self.grid, [row.variant for row in self.points if row.metric == self.grid.metric]
        pictures = grid.pictures or {"": (grid.title, finished[: report.LINES])}
        found = {}
        for ending, (title, names) in pictures.items():
            if runs := {name: self.runs[name] for name in names if name in finished}:
                found[ending] = report.figure_of(runs, title, grid.metric, grid.label)
        return found

    @classmethod
    def redraw(cls, file: Path) -> list[Path]:
        """The pictures show single runs too, so that they are drawn from the runs beside the file."""
        run = cls(cls.options_of(json.loads(file.read_text())))
        run.options.plan = FamilyGrid.read(run.options.grid)
        run.read(file.parent)
        return run.draw(file.parent)


if __name__ == "__main__":
    sys.exit(Family.main())
