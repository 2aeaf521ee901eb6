"""`linrope serve`: a process that answers and ends well, and mistakes in its options."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.cli.main import main

ROOT = Path(__file__).parents[2]
KEY = {"authorization": "Bearer from the environment"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("served") / "model"
    LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2)).save_pretrained(folder)
    return folder


def started(folder: Path, *options: str) -> tuple[subprocess.Popen, str, str]:
    """A server on a free port, its address, and what it said."""
    command = [sys.executable, "-m", "linrope", "serve", f"--ckpt_path={folder}", "--port=0", *options]
    environment = {**os.environ, "LINROPE_API_KEY": "from the environment\n"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert found is not None, line + process.stderr.read()
    return process, found.group(), line


@pytest.mark.exhaustive
def test_a_signal_lets_requests_under_way_end_and_the_next_server_has_the_cache(folder, tmp_path):
    body = {"prompt": "a story", "max_tokens": 300, "seed": 1, "top_k": 1}
    cache = f"--cache_folder={tmp_path / 'cache'}"
    process, url, line = started(folder, cache)
    ask = partial(httpx.post, f"{url}/v1/completions", json=body, headers=KEY, timeout=60)
    try:
        assert line == f"linrope: model is served at {url}/v1 (with an API key)\n"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=KEY).json()["data"][0]["id"] == "model"
        whole = text_of(ask())
        with (
            ThreadPoolExecutor(1) as pool,
            httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=KEY) as stream,
        ):
            lines = stream.iter_lines()
            parts = [next(lines)]  # decoding has begun
            waiting = pool.submit(ask)
            while not waiting.done() and "running_rows 2.0" not in httpx.get(f"{url}/metrics", headers=KEY).text:
                pass
            process.send_signal(signal.SIGTERM)
            parts += list(lines)
            assert text_of(waiting.result()) == whole
        events = [json.loads(part[6:]) for part in parts if part.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        assert parts[-2:] == ["data: [DONE]", ""]
        assert (process.wait(30), process.stderr.read()) == (0, "")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        end(process)
    process, url, _ = started(folder, cache)
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=KEY)
        assert text_of(answer) == whole
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        end(process)


def text_of(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stderr.close()


def test_mistakes_in_the_options(folder, tmp_path, error_of, monkeypatch):
    model = f"--ckpt_path={folder}"
    cases = {
        ("--port=70000",): "--port=70000 must be from 0 to 65535",
        ("--host=no.such.host.invalid",): "--host=no.such.host.invalid --port=8000: cannot listen there",
        ("--host=192.0.2.1",): "Cannot assign requested address",
        ("--max_rows=0",): "--max_rows=0 must be at least 1",
        ("--time_limit=0",): "--time_limit=0.0 must be a number of seconds above 0",
        ("--cache_gb=-1",): "--cache_gb=-1.0 must be a number, at least 0",
        ("--cache_folder_gb=-1",): "--cache_folder_gb=-1.0 must be a number, at least 0",
        ("--snapshot_every=1000",): "--snapshot_every=1000 must be a power of two",
        ("--cache_folder=new", "--cache_gb=0"): "--cache_folder needs --cache_gb and --cache_folder_gb above 0",
        ("--api_key=",): "--api_key='' is empty",
        ("--api_key= ",): "--api_key=' ' is empty",
        ("--max_row=3",): "unknown option 'max_row'. Did you mean 'max_rows'?",
    }
    for options, message in cases.items():
        assert message in error_of("serve", model, *options), options
    with monkeypatch.context() as patch:
        patch.setenv("LINROPE_API_KEY", "\n")
        assert r"LINROPE_API_KEY='\n' is empty: give a key" in error_of("serve", model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host=127.0.0.1 --port={port}: cannot listen there (Address already in use)" in error_of(
            "serve", model, f"--port={port}"
        )
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    assert "damaged or no checkpoint" in error_of("serve", f"--ckpt_path={tmp_path / 'text.ckpt'}", "--port=0")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").touch()
    message = f"--cache_folder={str(tmp_path / 'texts')!r} holds something else: give a new or an empty folder"
    assert message in error_of("serve", model, "--port=0", f"--cache_folder={tmp_path / 'texts'}")
    assert "does not exist" in error_of("serve", f"--ckpt_path={tmp_path / 'missing'}", "--port=0")
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            message = (
                f"linrope serve needs the package {package}, which is not installed: pip install 'linrope[serve]'."
            )
            assert message in error_of("serve", model)


def test_a_model_of_tokens_alone_cannot_be_served(tmp_path, error_of):
    model = LanguageModel(LanguageModelConfig(vocab_size=40, d_model=16, n_layers=1, n_heads=2))
    model.save_pretrained(tmp_path / "model")
    assert "linrope serve needs a model of text" in error_of("serve", f"--ckpt_path={tmp_path / 'model'}", "--port=0")


def test_its_options_are_listed(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = capsys.readouterr().out
    assert "--max_queue" in out
    assert "Key that clients must send" in out
