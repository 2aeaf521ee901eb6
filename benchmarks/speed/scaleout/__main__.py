"""`python -m benchmarks.scaleout [PART]`: what sequence parallelism costs; without a part all but `row`.

counted     bytes of each collective beside the formula (seconds)
measured    time of a training step on 1, 2 and 4 processes of this machine (minutes, on a quiet machine)
row         peak memory of four processes that train on one row of 4,194,304 tokens (minutes)
modelled    time of a training step on 8 to 1,024 GPUs (seconds)

`python -m benchmarks.scaleout PART --help` shows a part's options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.speed.scaleout.counted import Counted
from benchmarks.speed.scaleout.measured import Measured
from benchmarks.speed.scaleout.modelled import Modelled
from benchmarks.speed.scaleout.part import Part
from benchmarks.speed.scaleout.row import Row

PARTS: dict[str, type[Part]] = {one.part: one for one in (Counted, Measured, Row, Modelled)}
LONG = "row"


def main(args: list[str] | None = None) -> int:
    """Run one part, or all but the long one with the options that all have. Returns the highest exit status."""
    args = sys.argv[1:] if args is None else args
    if args and args[0] in PARTS:
        return PARTS[args[0]].main(args)
    parser = argparse.ArgumentParser(
        "benchmarks.scaleout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path(Part.output), help=f"folder for results ({Part.output})")
    options = parser.parse_args(args)
    status = 0
    for name, part in PARTS.items():
        if name != LONG and status != 130:
            status = max(status, part.main([name, "--output", str(options.output)]))
    return status


if __name__ == "__main__":
    sys.exit(main())
