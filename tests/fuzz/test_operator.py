"""Random calls of the operator, all options jointly, against the definition."""

import random

import pytest

from linrope.ops.cpu_kernel import library
from tests.ops.cases import Case, assert_agree, doubled, run
from tests.ops.test_cpu_kernel import assert_near, in_float32

SEEDS = range(240)


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    causal, heads = draw.random() < 0.75, draw.randint(1, 4)
    length = draw.choice([1, 2, 3, draw.randint(4, 70), draw.randint(60, 200), draw.randint(250, 530)])
    head_dim = draw.choice([draw.randint(2, 9), draw.randint(8, 40)])
    normalize = draw.choice(["plain", "plain", "plain", "none", "rotary"])
    rope, signed = None, False
    if draw.random() < 0.85 or normalize == "rotary":
        signed = normalize != "rotary" and head_dim > 2 and draw.random() < 0.3
        most = (head_dim - 1 if signed else head_dim) // 2
        rope = {"rotary_dim": 2 * draw.randint(1, most), "interleaved": draw.random() < 0.5, "signed": signed}
        rope |= {"trainable": draw.random() < 0.5, "base": draw.choice([100.0, 10_000.0])}
        if draw.random() < 0.3:
            rope["base"] = [draw.choice([None, 3.0, 100.0, 1e6]) for _ in range(heads)]
    maps = ["elu1", "elu1", "relu", "exp", "softmax", doubled] + ["identity"] * (normalize == "none")
    packed = draw.random() < 0.3
    return Case(
        f"seed {seed}",
        length=length,
        keys=draw.randint(1, 150) if not causal and not packed and draw.random() < 0.6 else None,
        head_dim=head_dim,
        value_dim=draw.randint(1, 40),
        rope=rope,
        decay=draw.choice([0, 0, 1e-6, 0.1, 3.0, 30.0]) if causal else 0.0,
        masked=draw.random() < 0.3,
        packed=packed,
        past=draw.choice([None, None, 1, 77, 10**6, 10**9]),
        batch=draw.randint(1, 3),
        heads=heads,
        # a denominator near 0 would magnify the rounding of both sides
        options={"feature_map": draw.choice(maps), "normalize": normalize, "eps": 0.1, "causal": causal},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", SEEDS)
def test_chunked_is_the_definition(seed):
    case = random_case(seed)
    assert_agree(run(case, backend="chunked"), run(case), 1e-9)


@pytest.mark.exhaustive
@pytest.mark.skipif(library.why_none() is not None, reason=f"no library: {library.why_none()}")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_compiled_kernel_is_the_definition(seed):
    """As near as float32 allows: the definition or "chunked", whichever is less exact there. The gradient of log_decay
    is a difference of sums in both linear forms, and not in the definition."""
    case, single = random_case(seed), {}
    exact, forms = run(case), [run(case, in_float32, backend) for backend in ("reference", "chunked")]
    for name, right in exact.items():
        single[name] = max((form[name] for form in forms), key=lambda x, right=right: (x - right).abs().max())
    assert_near(run(case, in_float32, "cpu"), single, exact)
