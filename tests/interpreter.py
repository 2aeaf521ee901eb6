"""Triton's interpreter in place of a GPU, quick enough for tests."""

from importlib.util import find_spec

import pytest

from linrope.ops.triton_kernel import launch as triton


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the CUDA kernels on CPU tensors, with sizes that let two stretches, two blocks of one
    and a ragged end appear at lengths the definition can afford."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "stretch_of", lambda *sizes: 128)
    monkeypatch.setattr(triton, "BLOCK", 64)
    monkeypatch.setattr(triton, "SPAN", 64)
    if find_spec("triton") is not None:
        _prepare_the_language_once(monkeypatch)


def _prepare_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter prepares Triton's language at each call of a function within a kernel, on top of the preparation
    before, which takes nine tenths of its time: do it once a launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    prepared = set()
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def prepare_once(function):
        languages = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if languages in prepared:
            return None
        prepared.add(languages)
        return prepare(function)

    def launch_anew(self, *args, **kwargs):
        prepared.clear()
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
