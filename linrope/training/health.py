"""Signs of how a run's attention does, taken from the training steps themselves, and a word where one goes wrong."""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from linrope.feature_maps import after_signed, get_feature_map
from linrope.ops.inputs import number_documents
from linrope.watching import Seen, watched

N_QUERIES, N_KEYS = 16, 256
"""Denominators are taken at so many places of a row, signs of weights between them and so many keys."""


class LayerHealth:
    """What was seen of one layer in one step, as tensors on its device: reading them would wait for it.

    Of the first row of the batch; of a row in segments every one counts.
    """

    def __init__(self) -> None:
        self.denominators: list[Tensor] = []
        self.signs: list[Tensor] = []  # (2,): negative weights, and all
        self.decays: list[Tensor] = []  # (H,)
        self.outputs: list[Tensor] = []
        self.state_norm, self.state_length = torch.zeros(()), -1

    def note(self, seen: Seen) -> None:
        rope, log_decay, ids = (seen.options[name] for name in ("rope", "log_decay", "segment_ids"))
        length = seen.q.shape[2]
        queries, keys = (_spread(length, n, seen.q.device) for n in (N_QUERIES, N_KEYS))
        documents = None if ids is None else number_documents(ids[:1])[0]
        signed = 0 if rope is None else rope.signed_dim
        phi = after_signed(get_feature_map(seen.options["feature_map"]), signed).forward
        q, k = phi(seen.q[:1, :, queries].float()), phi(seen.k[:1].float())
        turned = (q, k[:, :, keys])
        if rope is not None:
            turned = rope.rotate(q, positions=queries), rope.rotate(k[:, :, keys], positions=keys)
        negative = (turned[0] @ turned[1].mT)[0] < 0
        pairs = _visible(queries, keys, documents)
        self.signs.append(torch.stack([(negative & pairs).sum(), pairs.sum() * len(negative)]))
        if seen.options["normalize"] == "plain":
            decay = None if log_decay is None else log_decay[0]
            past = None if seen.options["state"] is None else seen.options["state"].k_sum[0]
            self.denominators.append(
                denominators(q[0, :, :, signed:], k[0, :, :, signed:], queries, decay, documents, _from(past, signed))
            )
        if log_decay is not None:
            self.decays.append(log_decay[0].float().mean(-1))
        self.outputs.append(seen.o[0].abs().float().mean())
        if seen.final.length > self.state_length:
            self.state_norm, self.state_length = seen.final.kv[0].norm(), seen.final.length

    def values(self) -> dict[str, Tensor]:
        """By name, scalars: what there is to say of this kind of layer."""
        found = {"output": torch.stack(self.outputs).mean(), "state_norm": self.state_norm}
        negative, pairs = torch.stack(self.signs).sum(0)
        found["negative_weights"] = negative / pairs
        if self.denominators:
            found["smallest_denominator"] = torch.cat([d.flatten() for d in self.denominators]).min()
        if self.decays:
            reach = -1 / torch.stack(self.decays).mean(0)
            found |= {f"reach/head{head}": tokens for head, tokens in enumerate(reach)}
        return found


def denominators(
    q: Tensor, k: Tensor, queries: Tensor, log_decay: Tensor | None, documents: Tensor | None, past: Tensor | None
) -> Tensor:
    """Σ_j≤i e^(G_i - G_j) q_iᵀ k_j of features at some places i of a row.

    Args:
        q: (H, P, D), at the places `queries` (P,).
        k: (H, T, D), all keys.
        log_decay: (H, T), or None.
        documents: (T,) numbers, or None.
        past: (H, D), the sum of the keys before the row, or None.

    Returns:
        (H, P) float32.
    """
    every = torch.arange(k.shape[1], device=k.device)
    weights = q @ k.mT * _visible(queries, every, documents)
    reach = torch.ones((), device=q.device)
    if log_decay is not None:
        total = log_decay.double().cumsum(-1)
        exponent = total[:, queries, None] - total[:, None, :]
        weights = weights * exponent.clamp(max=0).exp().float()
        reach = total[:, queries].exp().float()
    found = weights.sum(-1)
    if past is not None:
        of_first = 1.0 if documents is None else (documents[queries] == 0).float()
        found = found + reach * of_first * torch.einsum("hpd,hd->hp", q, past.float())
    return found


def _from(past: Tensor | None, signed: int) -> Tensor | None:
    return None if past is None else past[:, signed:]


def _spread(length: int, n: int, device: torch.device) -> Tensor:
    """Up to n places of a row, from its first to its last."""
    return torch.linspace(0, length - 1, min(n, length), device=device).round().long()


def _visible(queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """(P, S) booleans: which keys come no later than a query, in its own document."""
    visible = keys[None, :] <= queries[:, None]
    return visible if documents is None else visible & (documents[keys][None, :] == documents[queries][:, None])


class HealthMonitor(Callback):
    """Logs, every `every_n_steps` optimizer steps, what a training batch shows of its linear layers:

    - `health/smallest_denominator`: over layers, heads and 16 places of a row; near ε outputs are noise.
    - `health/negative_weights`: the share of numerator weights below 0, between 16 queries and 256 keys.
    - `health/reach/layerL/headH`: -1 / mean log_decay, the tokens over which a gate that forgot evenly would
      let a weight fall to 1/e.
    - `health/output/layerL`: mean |o|, before norm and gate; it should not grow or fade with depth.
    - `health/state_norm/layerL`: the norm of the state at the end of the row.

    All of the first row of the step's last batch on each device, of which the first logs. Values go to the loggers at
    once, in rows of their own. `seconds` is the time it took so far, of which there is a log too:
    `health/share_of_time`.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.seconds = 0.0
        self._layers: dict[int, LayerHealth] = {}
        self._watching = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        last_of_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if last_of_step and (trainer.global_step + 1) % self.every_n_steps == 0:
            self._layers = {}
            self._watching.enter_context(watched(pl_module.model, self._note))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._watching.close()
        if not self._layers:
            return
        began = time.perf_counter()
        metrics = self._metrics()
        self._layers = {}
        now = time.perf_counter()
        self.seconds += now - began
        metrics["health/share_of_time"] = self.seconds / (now - self._began)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # Lightning counts logged steps from 0

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._watching.close()

    @torch.no_grad()
    def _note(self, seen: Seen) -> None:
        began = time.perf_counter()
        with torch.autocast(seen.q.device.type, enabled=False):
            self._layers.setdefault(seen.layer, LayerHealth()).note(seen)
        self.seconds += time.perf_counter() - began

    def _metrics(self) -> dict[str, float]:
        names, tensors = [], []
        for layer, health in sorted(self._layers.items()):
            for name, value in health.values().items():
                first, _, rest = name.partition("/")
                names.append("/".join(filter(None, ("health", first, f"layer{layer}", rest))))
                tensors.append(value)
        values = dict(zip(names, torch.stack([tensor.float() for tensor in tensors]).tolist()))  # one transfer
        found = {name: value for name, value in values.items() if not name.startswith(_OVERALL)}
        for name, over in zip(_OVERALL, (min, statistics.fmean)):
            if of_layers := [value for full, value in values.items() if full.startswith(name)]:
                found[name] = over(of_layers)
        return found


_OVERALL = ("health/smallest_denominator", "health/negative_weights")
"""Given for all layers as one number: the smallest, and the mean."""


class SpikeWarning(Callback):
    """Says where the loss or the gradient's norm leaves its course: above `factor` times the running median.

    One line on the console, with the step and the samples of its batch, which a data module with `samples_of(step)`
    names: the order is a function of the seed and the step, so that the batch can be looked at. `found` keeps them as
    (step, what, value, median).

    Args:
        console: where to.
        factor: from where on it is a spike.
        window: how many steps the median is of; before there are a quarter of them nothing is said.
    """

    def __init__(self, console: Console, factor: float, window: int = 100) -> None:
        self.console, self.factor, self.window = console, factor, window
        self.before = {name: deque[float](maxlen=window) for name in ("train_loss", "grad_norm")}
        self.found: list[tuple[int, str, float, float]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        spikes = []
        for name, before in self.before.items():
            value = trainer.callback_metrics[name].item()
            median = statistics.median(before) if len(before) >= self.window // 4 else None
            if median is not None and value > self.factor * median:
                self.found.append((trainer.global_step, name, value, median))
                spikes.append(f"{name} {value:.3g} is {value / median:.1f} times its median")
            before.append(value)
        if spikes and trainer.is_global_zero:
            samples = getattr(trainer.datamodule, "samples_of", lambda step: f"batch {batch_idx}")
            where = samples(trainer.global_step - 1)
            line = f"spike at step {trainer.global_step}: {', '.join(spikes)}; {where}"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
