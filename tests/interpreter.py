"""Triton's interpreter in place of a GPU, quick enough for tests."""

from importlib.util import find_spec

import pytest

from linrope.ops.triton_kernel import launch, plan


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the CUDA kernels on CPU tensors. With these sizes 130 tokens have two stretches, a
    stretch of two blocks, and a ragged end."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(plan, "stretch_of", lambda *sizes: 128)
    monkeypatch.setattr(launch, "SCAN_BLOCK", 64)
    monkeypatch.setattr(launch, "ANGLE_BLOCK", 64)
    if find_spec("triton") is not None:
        _prepare_the_language_once(monkeypatch)


def _prepare_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter prepares Triton's language again at each call of a device function: nine tenths of its time.
    Prepare it once for each launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepared = set()
    prepare, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def prepare_once(function):
        languages = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if languages in prepared:
            return None
        prepared.add(languages)
        return prepare(function)

    def run_prepared(self, *args, **kwargs):
        prepared.clear()
        return run_grid(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_prepared)
