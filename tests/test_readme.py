"""The README's code runs as written, and its files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[1] for block in BLOCKS])
def test_the_code_runs(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_it_shows_the_three_uses():
    assert len(BLOCKS) == 4
    assert "benchmarks.scaling" in README
    assert not re.search(r"[A-Z]+-FIGURES|TODO", README)


def test_every_file_it_names_is_there():
    named = set(re.findall(r"(?:configs|benchmarks)/[\w./-]+|CONTRIBUTING\.md", README))
    assert {"configs/quickstart.yaml", "configs/lm-small.yaml"} <= named
    for name in named:
        assert (ROOT / name).exists(), name


def test_importing_linrope_needs_neither_lightning_nor_rich():
    code = "import sys, linrope; print([m for m in ('lightning', 'jsonargparse', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
