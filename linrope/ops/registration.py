"""The linear kernels as operators of PyTorch: one pair, forward and backward, whose last argument names the kernel.

Here stands what PyTorch must know to compile, export and differentiate them: schemas, shapes, autograd and FLOPs.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linrope.errors import InputError
from linrope.ops.call import Call, without_autocast
from linrope.ops.checks import is_transformed
from linrope.ops.cpu_kernel import kernel as cpu_kernel
from linrope.ops.state import State
from linrope.ops.torch_kernel import kernel as torch_kernel
from linrope.ops.torch_kernel.memory import Pool
from linrope.ops.triton_kernel import kernel as triton_kernel

KERNELS: dict[str, ModuleType] = {"chunked": torch_kernel, "cpu": cpu_kernel, "triton": triton_kernel}


def operator(call: Call, kernel: str) -> tuple[Tensor, State]:
    """(o, final state) of one call by that kernel."""
    first = _first_state(call, kernel)
    refuse_transforms(kernel, *call.operator_tensors, *first)
    directly = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    attend = torch.ops.linrope.linear_attention if directly else _Differentiable.apply
    o, _, _, _, kv, k_sum = attend(*first, *call.operator_args, kernel)
    return o, State(kv, k_sum, call.start + call.k.shape[2], call.final_log_decay())


def _first_state(call: Call, kernel: str) -> tuple[Tensor | None, Tensor | None]:
    """kv and k_sum before the first token; None for zeros that the kernel need not read."""
    if call.state is None and KERNELS[kernel].TAKES_NO_PAST:
        return None, None
    return call.past.kv, call.past.k_sum


def one_token(call: Call, kernel: str) -> tuple[Tensor, State]:
    """A decoding step by that kernel, without a gradient."""
    past = call.past
    refuse_transforms(kernel, *call.operator_tensors, past.kv, past.k_sum)
    o, kv, k_sum = torch.ops.linrope.one_token(past.kv, past.k_sum, call.position, *call.operator_args, kernel)
    position = call.start if call.position is None else call.position
    return o, State(kv, k_sum, position + 1, call.final_log_decay())


class NoTransforms(InputError):
    """A call within a transform of `torch.func`, which the operators cannot take."""


def refuse_transforms(kernel: str, *tensors: Tensor | None) -> None:
    """The operators have no rule for them: jvp would take the tangent as 0, others would fail deep inside PyTorch."""
    if not torch.compiler.is_compiling() and is_transformed(*tensors):
        raise NoTransforms(
            f"backend={kernel!r} supports no transforms of torch.func (grad, jvp, vmap) and no forward-mode "
            "differentiation: use backend='auto' or 'reference'; or torch.autograd.grad for grad, a larger B for vmap."
        )


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? theta, Tensor? key_mask, Tensor? documents, "
    "SymInt start, str feature_map, str normalize, float eps, bool interleaved, bool causal, int signed"
)
"""`Call.operator_args`. The kernel's name follows as `backend`: Inductor needs the name `kernel` itself."""
_FORWARD, _BACKWARD = "linrope::linear_attention", "linrope::linear_attention_backward"
_ONE_TOKEN = "linrope::one_token"
_THREE, _SIX = (", ".join(["Tensor"] * count) for count in (3, 6))
torch.library.define(_FORWARD, f"(Tensor? kv, Tensor? k_sum, {_CALL}, str backend) -> ({_SIX})")
torch.library.define(_ONE_TOKEN, f"(Tensor kv, Tensor k_sum, Tensor? position, {_CALL}, str backend) -> ({_THREE})")
torch.library.define(
    _BACKWARD,
    "(Tensor grad_o, Tensor? grad_kv, Tensor? grad_k_sum, Tensor o, Tensor den, Tensor kv_at, Tensor k_sum_at, "
    f"bool d_decay, bool d_theta, {_CALL}, str backend) -> ({_SIX}, Tensor)",
)


@torch.library.impl(_FORWARD, "default")
def _(kv, k_sum, *call_and_kernel):
    *args, kernel = call_and_kernel
    q = args[0]
    with without_autocast(q), torch.cuda.device_of(q), Pool.held():
        return KERNELS[kernel].forward(Call(*args), kv, k_sum)


@torch.library.impl(_BACKWARD, "default")
def _(grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, *call_and_kernel):
    *args, kernel = call_and_kernel
    saved = o, den, kv_at, k_sum_at
    with without_autocast(o), torch.cuda.device_of(o), Pool.held():
        return KERNELS[kernel].backward(Call(*args), saved, grad_o, grad_kv, grad_k_sum, d_decay, d_theta)


@torch.library.impl(_ONE_TOKEN, "default")
def _(kv, k_sum, position, *call_and_kernel):
    *args, kernel = call_and_kernel
    with torch.cuda.device_of(kv), Pool.held():
        return KERNELS[kernel].one_token(Call(*args, position=position), kv, k_sum)


@torch.library.register_fake(_ONE_TOKEN)
def _(kv, k_sum, position, q, k, v, *rest):
    o = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype, device=v.device)
    return o, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


@torch.library.register_fake(_FORWARD)
def _(kv, k_sum, *call_and_kernel):
    *args, kernel = call_and_kernel
    return KERNELS[kernel].outputs(Call(*args), kv, k_sum)


@torch.library.register_fake(_BACKWARD)
def _(grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, log_decay, theta, *rest):
    like = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    nothing = q.new_empty(0)
    batch, heads, _, features = q.shape
    return (
        *like,
        torch.empty_like(log_decay, memory_format=torch.contiguous_format) if d_decay else nothing,
        torch.empty_like(theta) if d_theta else nothing.clone(),
        kv_at.new_empty(batch, heads, features, v.shape[-1]),
        kv_at.new_empty(batch, heads, features),
    )


def _save(ctx, inputs, output) -> None:
    kv, k_sum, *args, kernel = inputs
    call = Call(*args)
    o, den, kv_at, k_sum_at, _, _ = output
    ctx.mark_non_differentiable(den, kv_at, k_sum_at)
    ctx.set_materialize_grads(False)
    tensors, ctx.options = args[:7], (*args[7:], kernel)
    states = (kv_at, k_sum_at) if KERNELS[kernel].KEEPS_STATES else (kv, k_sum)  # or sum them again from the past
    ctx.save_for_backward(o if call.plain else den, den, *states, *tensors)  # only the denominator's gradient needs o


def _differentiate(ctx, grad_o, _den, _kv_at, _k_sum_at, grad_kv, grad_k_sum):
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True asks for a second derivative, which only backend='reference' has: use it. Of a model, "
            "nest torch.func.grad over torch.func.functional_call: in transforms it takes that backend by itself."
        )
    o, den, kv_at, k_sum_at, q, k, v, *others = ctx.saved_tensors  # read once: checkpointing recomputes at each access
    if grad_o is None:
        o, den = torch.zeros_like(o), torch.ones_like(den)  # the loss reads no quotient, not even one of 0 by 0
        grad_o = v.new_zeros(()).expand(*q.shape[:3], v.shape[-1])
    of_past = ctx.needs_input_grad[:2]
    d_decay, d_theta = ctx.needs_input_grad[5:7]
    *dqkv, d_log_decay, d_theta_out, d_kv, d_k_sum = torch.ops.linrope.linear_attention_backward(
        grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, *others, *ctx.options
    )
    optional = d_log_decay if d_decay else None, d_theta_out if d_theta else None
    past = (d if needed else None for d, needed in zip((d_kv, d_k_sum), of_past))
    return *past, *dqkv, *optional, *(None,) * (2 + len(ctx.options))  # key_mask and documents have none


torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_save)


class _Differentiable(torch.autograd.Function):
    """The operator with its gradient, without what `register_autograd` does besides, which graphs need."""

    @staticmethod
    def forward(ctx, *args):
        output = torch.ops.linrope.linear_attention(*args)
        _save(ctx, args, output)
        return output

    backward = staticmethod(_differentiate)


@register_flop_formula(torch.ops.linrope.linear_attention)
def _(kv_shape, k_sum_shape, *shapes_and_options, out_shape=None, **_unused) -> int:
    *args, kernel = shapes_and_options
    return KERNELS[kernel].flops(Call(*args), backward=False)


@register_flop_formula(torch.ops.linrope.linear_attention_backward)
def _(*shapes_and_options, out_shape=None, **_unused) -> int:
    *args, kernel = shapes_and_options[9:]
    return KERNELS[kernel].flops(Call(*args), backward=True, sums_needed=shapes_and_options[2] is not None)
