"""Losses by position, and of the same text in rows of other lengths."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from linrope import LanguageModel, LanguageModelConfig
from linrope.data.corpus.files import find_sources
from linrope.data.corpus.sequences import Corpus
from linrope.data.tokenizers.bytes import SEPARATOR
from linrope.errors import InputError
from linrope.evaluation import row_lengths as reading
from linrope.evaluation.length_report import lengths_figure, positions_figure
from linrope.evaluation.loss_by_position import LossByPosition, bucket_of
from linrope.evaluation.row_lengths import Excerpt, excerpt_for, parse_lengths, read_at_lengths, row_losses
from linrope.losses import IGNORE


def bits_of(model: LanguageModel, text: torch.Tensor, length: int, kept: slice | torch.Tensor = slice(None)) -> float:
    """Bits per token of a text in rows of a length, all rows read at once."""
    with torch.no_grad():
        logits = model(text[:-1].view(-1, length)).flatten(0, 1)
    return cross_entropy(logits[kept], text[1:][kept]).item() / math.log(2)


def small(**options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(d_model=16, n_layers=1, n_heads=2, short_conv=4, **options)).eval()


def test_buckets_double():
    positions = torch.tensor([0, 15, 16, 31, 32, 63, 64, 127, 128, 2**40 - 1, 2**40])
    assert bucket_of(positions).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 36, 37]


def test_losses_by_position_are_means_over_the_bytes_of_each_bucket():
    losses = torch.arange(2 * 40, dtype=torch.float32).view(2, 40)
    targets = torch.full((2, 40), 7)
    targets[0, 17] = SEPARATOR  # its nats count, but it is no byte
    targets[1, 33] = IGNORE
    losses[1, 33] = 0
    found = LossByPosition()
    found.add(losses[:1], targets[:1])
    found.add(losses[1:], targets[1:])  # as batches come
    assert [(b.first, b.last, b.tokens) for b in found.buckets()] == [(1, 16, 32), (17, 32, 32), (33, 40, 15)]
    for bucket, n_bytes in zip(found.buckets(), (32, 31, 15)):
        nats = losses[:, bucket.first - 1 : bucket.last].sum().item()
        assert bucket.bits_per_byte == pytest.approx(nats / n_bytes / math.log(2), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(losses.sum().item() / 78 / math.log(2), rel=1e-12)


def test_bytes_by_position_are_those_that_tokens_stand_for():
    found = LossByPosition()
    n_bytes = torch.tensor([[3] * 16 + [0, 5] + [2] * 14])
    found.add(torch.ones(1, 32), torch.full((1, 32), 300), n_bytes)
    expected = [16 / math.log(2) / 48, 16 / math.log(2) / 33]
    assert [b.bits_per_byte for b in found.buckets()] == pytest.approx(expected, rel=1e-12)
    excerpt = Excerpt(torch.arange(33), n_bytes[0])
    assert torch.equal(excerpt.rows(16)[2], n_bytes.view(2, 16))


def test_the_same_text_is_read_at_each_length(monkeypatch):
    monkeypatch.setattr(reading, "SEGMENT", 24)
    model, text, told = small(), torch.randint(256, (129,)), []
    readings = list(read_at_lengths(model, Excerpt(text, None), [32, 128], 32, told.append))
    assert [(r.length, r.multiple, r.rows) for r in readings] == [(32, 1.0, 4), (128, 4.0, 1)]
    assert sum(told) == 2 * 128
    for found in readings:
        # float32 sums in another order; no separator among these tokens, so bits per token are bits per byte
        assert found.by_position.bits_per_byte == pytest.approx(bits_of(model, text, found.length), rel=1e-5)
        assert found.shortest.bits_per_byte == pytest.approx(readings[0].by_position.bits_per_byte, rel=1e-6)
    # the same tokens at the same places: positions 65 … 128 of the long row are the third and the fourth short one
    last = readings[1].shortest.buckets()[-1]
    assert (last.first, last.last) == (65, 128)
    assert last.bits_per_byte == pytest.approx(bits_of(model, text[64:], 32), rel=1e-5)
    # in the later half of both: the later halves of the last two short rows, read in them and in the long one
    later = torch.zeros(128, dtype=torch.bool)
    later[80:96] = later[112:128] = True
    for rows, found in ((32, readings[1].later_half_of_the_shortest), (128, readings[1].later_half)):
        assert found == pytest.approx(bits_of(model, text, rows, later), rel=1e-5)
    assert readings[1].later_half != pytest.approx(readings[1].later_half_of_the_shortest, rel=1e-4)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_documents_apart_are_read_by_themselves(monkeypatch, attention):
    """Pieces of 24 end within documents, at their ends, and hold several."""
    monkeypatch.setattr(reading, "SEGMENT", 24)
    model, text = small(attention=attention), torch.randint(256, (129,))
    text[[5, 23, 60, 71, 79]] = SEPARATOR
    (found,) = read_at_lengths(model, Excerpt(text, None, SEPARATOR), [128], 32)
    edges = [0, 6, 24, 61, 72, 80, 128]
    with torch.no_grad():
        logits = torch.cat([model(text[None, a:b])[0] for a, b in pairwise(edges)])
    n_bytes = (text[1:] != SEPARATOR).sum().item()
    bits = cross_entropy(logits, text[1:], reduction="sum").item() / math.log(2) / n_bytes
    assert found.by_position.bits_per_byte == pytest.approx(bits, rel=1e-5)  # float32 sums in another order
    whole = cross_entropy(model(text[None, :-1])[0], text[1:], reduction="sum").item()
    assert row_losses(model, text, 128).sum().item() == pytest.approx(whole, rel=1e-5)
    (flowing,) = read_at_lengths(model, Excerpt(text, None), [128], 32)
    assert flowing.by_position.bits_per_byte != pytest.approx(bits, rel=1e-4)  # ten times as much


def test_lengths_are_tokens_or_multiples_of_the_context():
    assert parse_lengths(["4x", "1x", "256", "16x"], 64) == [64, 256, 1024]
    for text in ("x", "0x", "-4", "1.5x"):
        with pytest.raises(InputError, match=f"--lengths {text}: give numbers of tokens, or multiples of data.con"):
            parse_lengths([text], 64)
    with pytest.raises(InputError, match="--lengths: 100 does not divide the longest, 256"):
        parse_lengths(["1x", "100", "4x"], 64)


def test_a_text_holds_whole_rows_of_the_longest_length(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 999)
    corpus = Corpus(find_sources(tmp_path / "text").documents)
    for asked, n_rows in ((600, 2), (10, 1), (10_000, 3)):
        assert len(excerpt_for(corpus, [64, 256], asked).tokens) == n_rows * 256 + 1
    assert [excerpt_for(corpus, [64], 64, mask).separator for mask in (False, True)] == [None, SEPARATOR]
    with pytest.raises(InputError, match="1024 tokens are more than the validation split has \\(999 with a target"):
        excerpt_for(corpus, [1024], 600)
    with pytest.raises(InputError, match="the validation split has no token with a target: give it a share"):
        excerpt_for([], [64], 600)


def test_pictures_have_few_lines_and_say_what_they_show():
    lengths = [16 << n for n in range(9)]
    by_length = [{"length": n, "multiple": n / 16, "bits_per_byte": 2.0 + n / 2**20} for n in lengths]
    bucket = {"first": 1, "last": 16, "tokens": 16, "bits_per_byte": 2.25, "in_rows_of_the_shortest": 2.0}
    axes = lengths_figure(by_length, "some model").axes[0]
    assert axes.get_ylabel() == "bits per byte"
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(0.1)  # a flat line looks flat
    figure = positions_figure([{"length": n, **bucket} for n in lengths], "some model")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["128", "256", "512", "1,024", "2,048", "4,096"]
    assert figure.axes[0].lines[0].get_data() == ([4.0], [0.25])
    assert "change against rows of 16" in figure.get_suptitle()
    (line,) = positions_figure([{"length": 16, **bucket}], "some model").axes[0].lines
    assert line.get_data() == ([4.0], [2.25])
