"""Documents that see their later tokens too, with tokens elsewhere: as if these were in the row."""

import torch

from linrope import RotaryEmbedding, linear_attention
from linrope.ops.open_documents import OpenEnds, attend_with_open_ends, summarize_first_document
from linrope.ops.summarize import summarize


def test_a_slice_of_packed_rows_given_the_other_tokens_of_its_first_and_last_documents():
    """Rows of 17 tokens, of which 5 … 11 are here: four documents, two, and one here."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 17, 4, dtype=torch.float64) for _ in range(3))
    key_mask, rope = torch.rand(3, 17) < 0.8, RotaryEmbedding(4)
    ids = torch.tensor([[0] * 7 + [1] * 2 + [2] * 2 + [3] * 6, [0] * 3 + [1] * 5 + [0] * 9, [4] * 17])
    here = slice(5, 12)
    of_whole = {"segment_ids": ids, "key_mask": key_mask, "causal": False}
    expected = linear_attention(q, k, v, rope, **of_whole, backend="reference")

    elsewhere = torch.ones(17, dtype=torch.bool)
    elsewhere[here] = False

    def state_of(documents):
        """Of each row's tokens elsewhere of one document; in whole rows, whose positions are those of the states."""
        visible = key_mask & elsewhere
        for row, document in enumerate(documents):
            belongs = torch.zeros(17, dtype=torch.bool)
            belongs[document] = True
            visible[row] &= belongs
        state = summarize(k, v, rope, key_mask=visible)
        return type(state)(length=5, **state.tensors)

    ends = OpenEnds(
        state_of([slice(0, 7), slice(3, 8), slice(0, 17)]), state_of([slice(11, 17), slice(8, 17), slice(0, 17)])
    )
    options = {"segment_ids": ids[:, here], "key_mask": key_mask[:, here], "causal": False}
    o, final = attend_with_open_ends(*(x[:, :, here] for x in (q, k, v)), rope, **options, ends=ends)
    torch.testing.assert_close(o, expected[:, :, here], rtol=1e-12, atol=1e-12)

    last = torch.tensor([[False] * 11 + [True] * 6, [False] * 8 + [True] * 9, [True] * 17])
    whole = summarize(k, v, rope, key_mask=key_mask & last)
    torch.testing.assert_close((final.kv, final.k_sum), (whole.kv, whole.k_sum), rtol=1e-12, atol=1e-12)
    assert final.length == 12
    assert final.log_decay[:, 0].tolist() == [-torch.inf, -torch.inf, 0]


def test_the_state_of_the_first_document():
    torch.manual_seed(1)
    k, v = (torch.randn(2, 1, 6, 4, dtype=torch.float64) for _ in range(2))
    ids, key_mask = torch.tensor([[3, 3, 0, 0, 3, 3], [1] * 6]), torch.tensor([[True, False] * 3] * 2)
    found = summarize_first_document(k, v, segment_ids=ids, key_mask=key_mask, feature_map="identity")
    torch.testing.assert_close(found.kv[0, 0], torch.outer(k[0, 0, 0], v[0, 0, 0]))
    torch.testing.assert_close(found.kv[1, 0], k[1, 0, ::2].T @ v[1, 0, ::2])
