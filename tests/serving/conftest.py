from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from linrope import LanguageModel, LanguageModelConfig
from linrope.data.tokenizers.bytes import ByteTokenizer, encode_prompt
from linrope.generation.sampling import Sampling
from linrope.serving.prefix_cache import PrefixCache
from linrope.serving.requests import Options, Request
from linrope.serving.scheduler import Limits, Scheduler

RECIPE = {"d_model": 16, "n_layers": 2, "n_heads": 2, "short_conv": 4, "forget_gate": True, "tie_embeddings": False}
SIZES = {
    "recipe": LanguageModelConfig(**RECIPE),
    "hybrid": LanguageModelConfig(**{**RECIPE, "n_heads": 4}, n_kv_heads=2, attention=["linear", "softmax"], window=20),
    "growing": LanguageModelConfig(**{**RECIPE, "n_heads": 4}, n_kv_heads=2, attention=["softmax", "linear"]),
}


def writing(config: LanguageModelConfig) -> LanguageModel:
    """A model that writes letters and line ends, and no end of a document."""
    torch.manual_seed(1)
    model = LanguageModel(config).eval()
    torch.nn.init.normal_(model.embedding.weight)
    torch.nn.init.constant_(model.output.weight, 0)
    with torch.no_grad():
        model.output.weight[[10, *range(97, 123)]] = torch.randn(27, config.d_model) * 2
    return model


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    return writing(SIZES["recipe"])


def prompt_of(text: str) -> np.ndarray:
    return encode_prompt(text).numpy().astype(np.int32)


def request_for(prompt: str | np.ndarray, streams: bool = False, temperature: float = 0.0, **options) -> Request:
    """A request; `options` are those of `Options` and of `Sampling`."""
    sampling = {name: options.pop(name) for name in ("seed", "top_p", "top_k") if name in options}
    chosen = Options(sampling=Sampling(temperature=temperature, **sampling), **options)
    prompt = prompt_of(prompt) if isinstance(prompt, str) else prompt
    return Request(prompt, chosen, ByteTokenizer(), streams)


@pytest.fixture
def make(model) -> Callable[..., Scheduler]:
    """A scheduler that is run by its `turn`."""

    def made(cache_bytes: int = 10**8, of: LanguageModel = model, **limits) -> Scheduler:
        return Scheduler(of, PrefixCache(cache_bytes), Limits(**{"segment_length": 64, "snapshot_every": 16, **limits}))

    return made


def finish(scheduler: Scheduler, *requests: Request) -> list[str]:
    """Submit requests together and run to the end: the text of each continuation."""
    scheduler.submit(requests)
    while scheduler.turn():
        pass
    return [text_of(choice) for request in requests for choice in request.choices]


def text_of(choice) -> str:
    piece = choice.take()
    return "" if piece is None else piece.text
