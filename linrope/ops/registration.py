"""The linear backends as operators of PyTorch: one pair, forward and backward, whose argument names the kernel.

What PyTorch must know to compile, export and differentiate them stands here: shapes, autograd and FLOPs.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from linrope.errors import InputError
from linrope.ops.call import Inputs, Options
from linrope.ops.reference import guarded, reference_attention
from linrope.ops.state import State
from linrope.ops.torch_kernel import chunked, noncausal
from linrope.ops.triton_kernel import launch as triton

KERNELS = {"chunked": chunked, "triton": triton}


def chunked_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """(o, final state) of one call, in time and memory linear in the length, on any device."""
    return _attention(inputs, "chunked")


def triton_attention(inputs: Inputs) -> tuple[Tensor, State]:
    """The same on a GPU, in a few launches.

    Raises:
        InputError: something that the kernels do not cover.
    """
    if reason := triton.why_not(inputs.q, inputs.v, inputs.settings.normalize):
        raise InputError(f"backend='triton' cannot take this call: {reason}; choose 'auto' or 'chunked'.")
    return _attention(inputs, "triton")


def _attention(inputs: Inputs, kernel: str) -> tuple[Tensor, State]:
    if 0 in (inputs.q.numel(), inputs.k.numel(), inputs.v.numel()):
        return reference_attention(inputs)  # nothing to make fast
    if inputs.settings.normalize == "rotary":
        return _with_rotary_denominator(inputs, kernel)
    if not inputs.settings.causal:
        return noncausal.by_document(inputs, lambda one: _operator(one, kernel))
    if inputs.q.shape[2] == 1 and kernel == "chunked":
        return chunked.one_token(inputs, _past(inputs))
    if inputs.q.shape[2] == 1 and not _needs_gradient(inputs):
        return _token_operator(inputs)
    return _operator(inputs, kernel)


def _needs_gradient(inputs: Inputs) -> bool:
    past = () if inputs.state is None else inputs.state.tensors.values()
    tensors = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.theta, *past
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _operator(inputs: Inputs, kernel: str) -> tuple[Tensor, State]:
    settings, past = inputs.settings, _past(inputs)
    numbers = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.theta, past.kv, past.k_sum
    _refuse_tangents(kernel, *numbers)
    o, _, _, _, kv, k_sum = torch.ops.linrope.linear_attention(*numbers, *Options.of(settings), kernel)
    return o, State(kv, k_sum, settings.start + inputs.k.shape[2], inputs.final_log_decay())


def _token_operator(inputs: Inputs) -> tuple[Tensor, State]:
    """A step of decoding by the kernel made for it, which has no gradient."""
    settings, past = inputs.settings, _past(inputs)
    numbers = inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.theta, past.kv, past.k_sum
    o, kv, k_sum = torch.ops.linrope.one_token(*numbers, *Options.of(settings), "triton")
    return o, State(kv, k_sum, settings.start + 1, inputs.final_log_decay())


def _refuse_tangents(kernel: str, *tensors: Tensor | None) -> None:
    """Forward-mode differentiation would find no rule here and take the tangent for 0; `torch.func.grad` finds none for
    its kind of tensors, and would say so in PyTorch's words."""
    if torch.compiler.is_compiling():
        return
    there = [x for x in tensors if x is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in there):
        raise InputError(f"forward-mode differentiation (jvp) does not go through backend={kernel!r}: use 'reference'.")
    if any(map(torch._C._functorch.is_gradtrackingtensor, there)):
        raise InputError(f"torch.func.grad does not go through backend={kernel!r}: use 'reference', or autograd.grad.")


def _past(inputs: Inputs) -> State:
    if inputs.state is not None:
        return inputs.state
    batch, heads, _, features = inputs.q.shape
    width, settings = inputs.v.shape[-1], inputs.settings
    return State.zeros(batch, heads, features, width, dtype=settings.dtype, device=inputs.q.device)


def _with_rotary_denominator(inputs: Inputs, kernel: str) -> tuple[Tensor, State]:
    """Rotated features in the denominator are one more value column, of ones: Σ_j w_ij q̃ᵀk̃ · 1."""
    v = torch.nn.functional.pad(inputs.v.to(inputs.settings.dtype), (0, 1), value=1)
    past = inputs.state
    if past is not None:
        past = replace(past, kv=torch.cat((past.kv, past.k_rotated_sum[..., None]), dim=-1), k_rotated_sum=None)
    settings = replace(inputs.settings, normalize="none")
    both, final = _attention(replace(inputs, v=v, state=past, settings=settings), kernel)
    num, den = both[..., :-1], both[..., -1:]
    o = num / guarded(den, inputs.settings.eps, "rotary")
    final = replace(final, kv=final.kv[..., :-1], k_rotated_sum=final.kv[..., -1])
    return o.to(inputs.v.dtype), final


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? theta{past}, Tensor? key_mask, Tensor? documents, "
    "SymInt start, str feature_map, bool plain, float eps, bool interleaved, bool causal, int signed=0, "
    "str backend='chunked'"  # not `kernel`, a name that Inductor needs
)


_FORWARD, _BACKWARD = "linrope::linear_attention", "linrope::linear_attention_backward"


_ONE_TOKEN = "linrope::one_token"


torch.library.define(
    _FORWARD,
    f"({_ARGUMENTS.format(past=', Tensor kv, Tensor k_sum')}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


torch.library.define(_ONE_TOKEN, f"({_ARGUMENTS.format(past=', Tensor kv, Tensor k_sum')}) -> (Tensor, Tensor, Tensor)")


torch.library.define(
    _BACKWARD,
    "(Tensor grad_o, Tensor? grad_kv, Tensor? grad_k_sum, Tensor o, Tensor den, Tensor kv_at, Tensor k_sum_at, "
    f"bool d_decay, bool d_theta, {_ARGUMENTS.format(past='')}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _split(rest: tuple) -> tuple[Options, ModuleType]:
    """The operators' last arguments: options, and the kernel by name."""
    *options, kernel = rest if len(rest) > len(Options._fields) else (*rest, "chunked")
    return Options(*options), KERNELS[kernel]


def _forward(q, k, v, log_decay, theta, kv, k_sum, *rest):
    """Returns o, den, kv_at, k_sum_at, kv, k_sum: the output, what the backward needs, and the final state."""
    options, kernel = _split(rest)
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        return kernel.forward(q, k, v, log_decay, theta, kv, k_sum, options)


def _backward(grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, log_decay, theta, *rest):
    """Returns the gradients of q, k, v, log_decay, theta, kv and k_sum; those not asked for are empty."""
    options, kernel = _split(rest)
    saved = o, den, kv_at, k_sum_at
    with torch.autocast(q.device.type, enabled=False), torch.cuda.device_of(q):
        return kernel.backward(
            grad_o, grad_kv, grad_k_sum, *saved, d_decay, d_theta, q, k, v, log_decay, theta, options
        )


torch.library.impl(_FORWARD, "default", _forward)


torch.library.impl(_BACKWARD, "default", _backward)


@torch.library.impl(_ONE_TOKEN, "default")
def _(q, k, v, log_decay, theta, kv, k_sum, *rest):
    """Returns o, kv and k_sum."""
    with torch.cuda.device_of(q):
        return triton.one_token(q, k, v, log_decay, theta, kv, k_sum, _split(rest)[0])


@torch.library.register_fake(_ONE_TOKEN)
def _(q, k, v, log_decay, theta, kv, k_sum, *rest):
    o = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype, device=v.device)
    return o, kv.new_empty(kv.shape), k_sum.new_empty(k_sum.shape)


@torch.library.register_fake(_FORWARD)
def _(q, k, v, log_decay, theta, kv, k_sum, *rest):
    options, kernel = _split(rest)
    return kernel.outputs(q, v, kv, k_sum, options)


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
        k_sum_at.new_empty(batch, heads, features),
    )


def _save(ctx, inputs, output) -> None:
    q, k, v, log_decay, theta, kv, k_sum, key_mask, documents, *rest = inputs
    o, den, kv_at, k_sum_at, _, _ = output
    ctx.mark_non_differentiable(den, kv_at, k_sum_at)
    ctx.set_materialize_grads(False)
    ctx.rest = rest
    options, kernel = _split((key_mask, documents, *rest))
    states = (kv_at, k_sum_at) if kernel.KEEPS_STATES else (kv, k_sum)  # to sum the states again from
    saved = o if options.plain else den, den, *states  # without a denominator the output is not looked at again
    ctx.save_for_backward(*saved, q, k, v, log_decay, theta, key_mask, documents)


def _differentiate(ctx, grad_o, _den, _kv_at, _k_sum_at, grad_kv, grad_k_sum):
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True asks for a second derivative, which no backend but 'reference' has: "
            "use backend='reference'."
        )
    o, den, kv_at, k_sum_at, q, k, v, *others = ctx.saved_tensors  # once: checkpointing recomputes at each look
    if grad_o is None:
        grad_o = v.new_zeros(()).expand(*q.shape[:3], v.shape[-1])
    needs = ctx.needs_input_grad
    d_decay, d_theta = needs[3], needs[4]
    *dqkv, d_log_decay, d_theta_out, d_kv, d_k_sum = torch.ops.linrope.linear_attention_backward(
        grad_o, grad_kv, grad_k_sum, o, den, kv_at, k_sum_at, d_decay, d_theta, q, k, v, *others, *ctx.rest
    )
    optional = d_log_decay if d_decay else None, d_theta_out if d_theta else None
    return (*dqkv, *optional, d_kv, d_k_sum, *(None,) * (2 + len(ctx.rest)))


torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_save)


@torch.library.register_vmap(_FORWARD)
def _(info, in_dims, *args):
    raise InputError(
        "torch.vmap goes through no backend but 'reference': put the mapped dimension into B, which the operator takes "
        "in one call, or use backend='reference'."
    )


@register_flop_formula(torch.ops.linrope.linear_attention)
def _(q_shape, k_shape, v_shape, *rest, out_shape=None, **_unused) -> int:
    options, kernel = _split(rest[4:])
    return kernel.flops(q_shape, v_shape, options, backward=False)


@register_flop_formula(torch.ops.linrope.linear_attention_backward)
def _(*shapes_and_options, out_shape=None, **_unused) -> int:
    q_shape, _, v_shape, *rest = shapes_and_options[9:]
    options, kernel = _split(tuple(rest[2:]))
    return kernel.flops(q_shape, v_shape, options, backward=True, sums_asked=shapes_and_options[2] is not None)
