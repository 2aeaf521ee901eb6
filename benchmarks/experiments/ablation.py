"""A grid of training runs, (variant × seed), through the same LightningModule as users' runs.

    python -m benchmarks.ablation --grid benchmarks/grids/placement.yaml

First the training speeds are measured in turn, then the runs are made, one process at a time. The same command goes on
with a grid that was stopped, also inside a run, or to which seeds or variants were added; two commands divide the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.experiments import ablation_pictures as pictures
from benchmarks.experiments import ablation_report as report
from benchmarks.experiments.grid import n_steps, read_grid, settings_of
from benchmarks.experiments.results_folder import Folder, RunFailed, Speed, claimed
from benchmarks.experiments.training_run import INTERRUPTED
from benchmarks.harness.options import check_names
from benchmarks.harness.pictures import Figure
from benchmarks.harness.runner import AddOption, Benchmark, print_table
from benchmarks.harness.timing import Alternation
from benchmarks.harness.training_step import training_step
from linrope.training import OptimizerConfig

DRIFT = 0.1
"""A larger change of the reference's speed is reported."""


def run_process(spec_file: Path, show: Callable[..., None]) -> tuple[int, Collection[str]]:
    """The exit status of `benchmarks.training_run`, and its last output, such as a traceback; `show` gets its progress,
    as options of `tick`."""
    command = [sys.executable, "-m", "benchmarks.training_run", str(spec_file)]
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(path)}
    last = deque(maxlen=20)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        for line in process.stdout:
            try:
                show(**json.loads(line))
            except (json.JSONDecodeError, TypeError):  # no JSON, or not an object
                last.append(line.rstrip())
        return process.wait(), last
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


class Ablation(Benchmark):
    """`results` are the finished runs, when the table is made."""

    name = "ablation"
    point = report.Row
    output = ""

    @classmethod
    def add_options(cls, add: AddOption) -> None:
        add("--grid", type=Path, required=True, help="a YAML file, such as those in benchmarks/grids")
        add("--output", type=Path, help="folder for results (default: results/ablation/GRID)")
        only = "run these variants alone, with all their seeds (default: all)"
        add("--only", nargs="+", metavar="VARIANT", help=only)
        add("--rounds", type=int, default=5, help="rounds in which the training speeds are measured (default: 5)")
        add("--device", choices=["cpu", "cuda"], default="cpu", help="where models are trained and speeds measured")
        add("--report", action="store_true", help="report the finished runs, and run nothing")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """`folder` is added."""
        options.output = options.output or Path("results/ablation", options.grid.stem)
        grid = read_grid(options.grid)
        options.folder = Folder(options.output, grid, settings_of(grid, read_text=not options.report), options.device)
        options.folder.check(runs_follow=not options.report)
        options.only = options.only or list(grid.variants)
        check_names(parser, "--only", options.only, grid.variants)
        if options.report and not options.folder.results():
            parser.error(f"--report: {options.output} holds no finished run of {options.grid}; run it without --report")

    def measure(self) -> None:
        # also where a shell starts background processes that ignore Ctrl-C: a run must not outlive this process
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.default_int_handler)
        if self.options.report:
            return
        self.options.folder.runs.mkdir(parents=True, exist_ok=True)
        try:
            self.make_runs(self.measure_speeds())
        except RunFailed as error:
            self.failure = str(error)

    def measure_speeds(self) -> dict[str, Speed]:
        """Training speeds of the variants of --only, measured once for a folder, by one process at a time."""
        waits = False
        while True:
            with claimed(self.options.output / "speed.lock") as lock:
                if lock is not None:
                    return self._measure_missing_speeds()
            if not waits:
                self.console.print("another process measures the speeds of this folder: waiting for it")
                waits = True
            time.sleep(1)

    def _measure_missing_speeds(self) -> dict[str, Speed]:
        """Speeds that are added later alternate with the reference (or with another that was measured, if it was not),
        and are scaled by the change in its speed since then. Variants with a curriculum have no single speed, and are
        omitted."""
        folder = self.options.folder
        known = folder.read_speeds()
        missing = [name for name in folder.speed_keys if name in self.options.only and name not in known]
        if not missing:
            return known
        reference = folder.grid.reference
        if reference not in (known or missing):
            reference = [*known, *missing][0]  # a variant that was measured is the clock
        found = self.time_steps([reference, *missing])
        if reference in known:
            drift = found[reference].tokens_per_second / known[reference].tokens_per_second
            if abs(drift - 1) > DRIFT:
                then = "its speed when the other variants were measured: the new speeds are corrected by this"
                self.console.print(f"{reference} trains at {drift:.2f} times {then}", highlight=False)
            found = {
                name: replace(speed, tokens_per_second=speed.tokens_per_second / drift) for name, speed in found.items()
            }
        folder.write_speeds(found | known)
        return folder.read_speeds()

    def time_steps(self, names: list[str]) -> dict[str, Speed]:
        """The speeds of these variants; equal steps are measured once, for the first variant that has them."""
        folder, device, rounds = self.options.folder, self.options.device, self.options.rounds
        first = {folder.speed_keys[name]: name for name in reversed(names)}
        settings = {name: folder.settings[name] for name in names if name in first.values()}
        try:
            steps = {
                name: training_step(
                    own.model_config,
                    own.timed_rows,
                    own.longest_row,
                    device,
                    bfloat16=folder.grid.bfloat16,
                    optimizer_of=partial(OptimizerConfig(**own.optimizer).optimizer_of, fused=True),
                )
                for name, own in settings.items()
            }
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RunFailed(f"no memory for the models of {', '.join(settings)}: {reason}") from error
        tick = self.progress("speed", (rounds + 1) * len(steps))
        alternation = Alternation(steps, device, count=False)
        alternation.run(rounds, lambda name: tick(advance=1, description=f"speed of {name}"))
        tick(visible=False)
        for name, error in alternation.failures.items():
            raise RunFailed(f"{name}: a training step failed: {error}") from error
        speeds = {}
        for name, sample in alternation.samples.items():
            tokens = settings[name].timed_rows * settings[name].longest_row
            speeds[name] = Speed(tokens / sample.median, sample.spread if rounds > 1 else None, self.device)
        return speeds

    def make_runs(self, speeds: dict[str, Speed]) -> None:
        """Make the missing runs of the variants of --only, one process at a time."""
        folder = self.options.folder
        tick = self.progress("runs", len(folder.grid.runs))
        for variant, seed in folder.missing:
            if variant not in self.options.only:
                continue
            tick(completed=len(folder.results()))
            result = folder.result_of(variant, seed)
            with claimed(result.with_suffix(".spec")) as spec_file:
                if spec_file is None:
                    told = "another process is making it"
                elif result.exists():
                    told = "another process made it meanwhile"
                else:
                    self.make_run(variant, seed, speeds.get(variant), spec_file)
                    told = report.in_a_line(json.loads(result.read_text()))
            self.console.print(f"{variant}, seed {seed}: {told}", markup=False, highlight=False)

    def make_run(self, variant: str, seed: int, speed: Speed | None, spec_file: Path) -> None:
        """One run in a process of its own, specified in `spec_file`; a curriculum needs no speed."""
        folder, name = self.options.folder, f"{variant}, seed {seed}"
        steps = n_steps(folder.grid, folder.settings[variant], speed and speed.tokens_per_second)
        result = folder.result_of(variant, seed)
        spec = {"identity": folder.identity(variant, seed), "steps": steps, "result": str(result.resolve())}
        spec_file.write_text(json.dumps(spec))
        tick = self.progress(name, steps)
        status, last = run_process(
            spec_file.resolve(), lambda now, **shown: tick(description=f"{name}, {now}", **shown)
        )
        tick(visible=False)
        if status in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise KeyboardInterrupt
        if status or not result.exists():
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else "failed"
            raise RunFailed(f"{name} {how}:\n" + "\n".join(last))

    def read(self, folder: Folder) -> None:
        """Read the finished runs, and make the rows of the table."""
        self.folder, self.results, self.speeds = folder, folder.results(), folder.read_speeds()
        self.points = report.rows_of(self.results, folder.grid, self.speeds)

    def finish(self) -> int:
        self.read(self.options.folder)
        if not self.results:
            self.options.output = None  # no files
        return super().finish()

    def show(self) -> None:
        rows, grid = self.points, self.folder.grid
        if rows:
            print_table(self.console, report.table_of(rows, grid), report.remarks(rows, self.results, grid))
        if (in_time := report.table_at_equal_seconds(rows, grid)) is not None:
            without = [row.variant for row in rows if math.isnan(row.at_equal_seconds)]
            print_table(self.console, in_time, report.remarks_on_speeds(self.speeds, without))

    @property
    def kept(self) -> str:
        return f"{len(self.folder.missing)} runs are left; the same command continues with them"

    def details(self) -> dict[str, Any]:
        speeds = self.speeds.items()
        return {
            "title": self.folder.grid.title,
            "reference": self.folder.grid.reference,
            "by_context": report.by_context(self.results),
            "by_eighth": report.by_eighth(self.results),
            "by_case": report.by_case(self.results),
            "caught_up": report.caught_up(self.results, self.folder.grid),
            "tokens_per_second": {name: speed.tokens_per_second for name, speed in speeds},
            "spread_of_tokens_per_second": {name: s.spread for name, s in speeds if s.spread is not None},
        }

    def figures(self) -> dict[str, Figure]:
        return pictures.figures_of(self.points, self.results, self.folder.grid)

    @classmethod
    def redraw(cls, file: Path) -> list[Path]:
        """The pictures show single runs too, so that they are drawn from the runs beside the file."""
        run = cls(cls.options_of(json.loads(file.read_text())))
        grid = read_grid(run.options.grid)
        run.read(Folder(file.parent, grid, settings_of(grid, read_text=False), run.options.device))
        return run.draw(file.parent)


if __name__ == "__main__":
    sys.exit(Ablation.main())
