from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import docstring_parser
import pytest

# Triton decides when it is imported, and when a kernel is defined, whether its interpreter runs it: here, always.
# tests/ops says where the kernels may be asked for on CPU tensors; elsewhere they need a GPU, as for a user.
os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is not None:
    importlib.import_module("linrope.ops.triton_kernel.kernels")
del os.environ["TRITON_INTERPRET"]

import torch
import torch.distributed as dist

from linrope import LanguageModel
from linrope.cli.main import main
from linrope.errors import InputError
from linrope.profiling import flops

# Tests this small only lose by more threads, and lose much beside other work on the machine. Not in a fixture, since
# fixtures of modules and of the session run before one of a test.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
LONGEST_FILES = ("test_ddp.py", "test_resume.py", "test_backends.py", "test_triton_kernel.py")
"""They run first, or one of the two processes would end long before the other."""


# Each command parses the docstrings of all options anew, which would be a seventh of the tests' time.
docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)


def cached_by_configuration(count: Callable[..., int]) -> Callable[..., int]:
    found: dict[tuple, int] = {}

    def cached(model: LanguageModel, *sizes: int) -> int:
        key = type(model), repr(model.config), sizes
        if key not in found:
            found[key] = count(model, *sizes)
        return found[key]

    return cached


# Each run counts the FLOPs of its model, mostly of the same small one.
flops._segment_flops = cached_by_configuration(flops._segment_flops)

HANDLERS = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}


@pytest.fixture(autouse=True)
def signal_handlers_stay_as_they_were() -> Iterator[None]:
    """Processes that a later test forks take them over: one that a command has set would keep them from ending."""
    yield
    for signum, handler in HANDLERS.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A strategy of several devices makes one, which processes that a later test forks would take for theirs."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test leaves a process group: let it run in a process of its own (tests/processes.py).")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


def assert_input_errors(*cases: tuple[Callable[[], object], str]) -> None:
    """Each call raises InputError with its message, a regular expression."""
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def covering(cases: Collection, default: Collection) -> list:
    """The cases of a parametrised test; those that are not in `default` are exhaustive."""
    assert all(case in cases for case in default)  # a case that is misspelt would run in neither
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[] if case in default else pytest.mark.exhaustive for case in cases]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks)]


LINE = "for i in range(10): print('the quick brown fox jumps over the lazy dog', i)\n"


def write_text_file(folder: Path) -> Path:
    """About 20 kB of text in one file, split by position."""
    file = folder / "corpus.txt"
    file.write_text("".join(LINE.replace("i", str(i)) for i in range(250)))
    return file


def write_documents(folder: Path, sizes: Iterable[int]) -> Path:
    """A folder of documents of these sizes, in bytes: letters, digits and signs that differ."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / f"{number:03}.txt").write_bytes(bytes(33 + (number * 7 + i * i) % 90 for i in range(size)))
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text_file(tmp_path)


def tiny_options(text_file: Path, folder: Path) -> list[str]:
    """Options that make any run small: model, text, folder and a few steps on the CPU."""
    options = {
        "model.d_model": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "data.path": text_file,
        "data.context": 32,
        "data.batch_size": 2,
        "data.num_workers": 0,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 2,
        "trainer.limit_val_batches": 2,
        "trainer.accumulate_grad_batches": 1,
        "run.folder": folder / "runs",
        "run.name": "tiny",
        "sample.max_new_tokens": 8,
    }
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.fixture
def tiny(text_file: Path, tmp_path: Path) -> list[str]:
    return tiny_options(text_file, tmp_path)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Where the first run of `tiny` leaves its logs and checkpoints."""
    return tmp_path / "runs" / "tiny" / "version_0"


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """The error of a command that must stop with exit code 2."""

    def run(*args: object) -> str:
        capsys.readouterr()
        assert main(list(map(str, args))) == 2
        return capsys.readouterr().err

    return run
