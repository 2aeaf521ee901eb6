"""Linear in the length: FLOPs, memory, and what is saved for the backward."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, baddbmm_flop

from linrope import linear_attention
from linrope.ops.call import check_call
from linrope.ops.cpu_kernel import kernel as cpu_kernel
from linrope.ops.torch_kernel import kernel
from linrope.ops.torch_kernel.plan import MAX_BLOCK

IN_PLACE = {torch.ops.aten.baddbmm_: lambda *shapes, **_: baddbmm_flop(*shapes)}
"""What PyTorch counts for `baddbmm` but not for its in-place form."""


def flops(length, head_dim=32, backward=False, **options):
    q, k, v = (torch.randn(1, 2, length, head_dim, requires_grad=backward) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        o = linear_attention(q, k, v, **options)
        if backward:
            o.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_the_noncausal_product_finds_its_linear_order(backend):
    """(q kᵀ) v for sequences shorter than the head, q (kᵀ v) for longer ones: opt_einsum weighs the sizes."""
    options = {"normalize": "none", "causal": False, "backend": backend}
    for length in (8, 16, 1000, 4000):
        products = 2 * 2 * 2 * length * 32 * min(length, 32)  # two of them, two heads, multiply and add
        # kᵀ v for the state that goes with the output: part of the long order already, where it is taken block by block
        state = 2 * 2 * length * 32 * 32 if backend == "reference" or length < 32 else 0
        assert flops(length, **options) == pytest.approx(products + state, rel=0.05)  # the denominator's are few


def saved_bytes(length, **options):
    """Bytes that autograd keeps for the backward of one call, beyond q, k, v and o; and those of q, k, v and o."""
    q, k, v = (torch.randn(1, 2, length, 32).requires_grad_() for _ in range(3))
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        o = linear_attention(q, k, v, **options)
    own = sum(x.nbytes for x in (q, k, v, o))
    assert set(kept) >= {x.untyped_storage().data_ptr() for x in (q, k, v)}
    return sum(kept.values()) - own, own


@pytest.mark.parametrize(("normalize", "blocks"), [("plain", 2), ("plain", 8), ("none", 2)])
@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_the_backward_keeps_q_k_v_o_den_and_a_state_for_each_block(normalize, blocks, backend):
    tokens, ends = {"chunked": (MAX_BLOCK, 2), "cpu": (cpu_kernel.BLOCK, 1)}[backend]  # one to spare for a ragged end
    beyond, own = saved_bytes(blocks * tokens, normalize=normalize, backend=backend)
    den_or_o = 4 * 2 * blocks * tokens if normalize == "plain" else -own // 4  # the output only for a denominator
    states = (blocks + ends) * 4 * 2 * (32 * 32 + 32)
    assert beyond == den_or_o + states


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("length", "features", "width", "causal", "decay"),
    [(1000, 32, 32, True, False), (777, 32, 48, True, True), (3 * MAX_BLOCK, 32, 16, False, False)],
)
def test_the_flops_reported_are_those_of_the_products_computed(length, features, width, causal, decay, plain):
    """The operators' formulas against PyTorch's count of the matrix products inside them."""
    q, k, v = (torch.randn(2, 3, length, size) for size in (features, features, width))
    log_decay = -torch.rand(2, 3, length) if decay else None
    past = torch.zeros(2, 3, features, width), torch.zeros(2, 3, features)
    call = check_call(q, k, v, log_decay=log_decay, normalize="plain" if plain else "none", causal=causal, eps=1e-6)
    saved = kernel.forward(call, *past)[:4]
    grads = torch.randn_like(v), None, None
    args = *call.operator_args, "chunked"
    with FlopCounterMode(display=False) as reported:
        torch.ops.linrope.linear_attention(*past, *args)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as computed:
        kernel.forward(call, *past)
    assert reported.get_total_flops() == computed.get_total_flops() > 0
    with FlopCounterMode(display=False) as reported:
        torch.ops.linrope.linear_attention_backward(*grads, *saved, False, False, *args)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as computed:
        kernel.backward(call, saved, *grads, False, False)
    assert reported.get_total_flops() == computed.get_total_flops() > 0


def test_flops_grow_with_the_length():
    assert flops(8 * MAX_BLOCK, backward=True) == 4 * flops(2 * MAX_BLOCK, backward=True)
