"""Parallel text as a trainer reads it: order, resuming, ranks, messages."""

import warnings
from itertools import islice

import pytest

from linrope.data.tokenizers.training import train_bpe
from linrope.errors import InputError
from linrope.positions.base import PositionsConfig
from linrope.training.data_modules.translation import TranslationDataModule
from tests.training.attached import attach, first_batches

SIZES = {"train": 60, "val": 7, "test": 5}


def write_pairs(folder, sizes=SIZES):
    """Files whose lines have one to nine words."""
    folder.mkdir(exist_ok=True)
    for split, n in sizes.items():
        for language, word in (("en", "word"), ("de", "Wort")):
            lines = [" ".join([f"{word}{i}"] * (1 + (i * 7) % 9)) for i in range(n)]
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return folder


def data_of(folder, **options):
    return TranslationDataModule(str(folder), **{"vocab_size": 300, "tokens_per_batch": 256, **options})


def test_batches_follow_from_seed_and_step_and_ranks_share_them(tmp_path):
    folder, data = write_pairs(tmp_path / "text"), []
    for step, rank, world in ((0, 0, 1), (3, 0, 1), (0, 0, 2), (0, 1, 2)):
        data.append(data_of(folder))
        attach(data[-1], step=step, rank=rank, world_size=world, accumulate=2)
    n_batches = data[0].training.n_batches
    whole = first_batches(data[0], 2 * n_batches)
    for batch, later in zip(whole[6:], first_batches(data[1], 2 * n_batches - 6)):
        assert batch.equal(later)
    for number, batch in enumerate(whole[:10]):
        assert batch.equal(first_batches(data[2 + number % 2], 5)[number // 2])
    other = data_of(folder, seed=1)
    attach(other)
    assert any(not a.equal(b) for a, b in zip(first_batches(other, n_batches), whole))
    assert data[0].steps_per_epoch_for(2) == -(-n_batches // 2)
    assert data[0].order() == data[3].order()
    assert data[0].order() != other.order()


def test_the_text_decides_the_order(tmp_path):
    folder = write_pairs(tmp_path / "text")
    orders = []
    for change in ("", "another word\n"):
        for language in ("en", "de"):
            with open(folder / f"train.{language}", "a") as file:
                file.write(change)
        data = data_of(folder, tokenizer="bytes")
        attach(data)
        orders.append(data.order())
    assert {name for name in orders[0] if orders[0][name] != orders[1][name]} == {"text"}


def test_the_longest_pair_of_an_evaluation_needs_positions(tmp_path):
    folder = write_pairs(tmp_path / "text")
    (folder / "val.de").write_text("Wort" * 50 + "\n" + "Wort\n" * 6)
    data = data_of(folder, tokenizer="bytes", max_length=100)
    attach(data)
    data.require_positions(PositionsConfig(name="learned", length=201))
    for length, message in ((200, "the longest row of data.val=201 is longer"), (99, "data.max_length=100 is longer")):
        with pytest.raises(InputError, match=message):
            data.require_positions(PositionsConfig(name="learned", length=length))


def test_evaluation_reads_all_pairs_once_and_predictions_keep_the_order_of_the_file(tmp_path):
    folder = write_pairs(tmp_path / "text")
    english = (folder / "test.en").read_text().splitlines()
    found = []
    for rank in range(2):
        data = data_of(folder, max_length=2)  # of training only
        attach(data, stage="test", rank=rank, world_size=2)
        for batch in data.test_dataloader():
            found += zip(batch["sources"], batch["references"])
    assert sorted(source for source, _ in found) == sorted(english)
    assert all(target == source.replace("word", "Wort") for source, target in found)
    (folder / "test.de").unlink()  # predictions need no references
    data = data_of(folder, max_length=2)
    attach(data, stage="predict")
    batches = list(data.predict_dataloader())
    assert [source for batch in batches for source in batch["sources"]] == english
    assert all(batch.keys() == {"inputs", "source_mask", "sources"} for batch in batches)


def test_what_is_left_out_is_counted_in_the_summary(tmp_path):
    folder = write_pairs(tmp_path / "text")
    with open(folder / "train.en", "a") as english, open(folder / "train.de", "a") as german:
        english.write("\nno translation\n" + "long " * 99 + "\n")
        german.write("ohne Quelle\n \nlang\n")
    data = data_of(folder, max_length=64)
    attach(data)
    pairs = data.training.pairs
    n_long = 60 + 1 - len(pairs)
    rows = dict(data.describe())
    left = f"(left out: 2 with an empty side, {n_long} longer than data.max_length=64)"
    assert rows["  train"] == f"{len(pairs)} pairs in {data.training.n_batches} batches {left}"
    assert rows["  val"] == "7 pairs"
    assert rows["text"] == f"{folder}, en to de"
    assert "BPE of 300 tokens, trained on the training text" in rows["tokenizer"]
    for language in ("en", "de"):
        with open(folder / f"val.{language}", "a") as file:
            file.write("\nmore\n")
    data = data_of(folder)
    with pytest.warns(UserWarning, match="the val text has 1 of 9 pairs with an empty side: left out"):
        attach(data, stage="validate")
    data = data_of(folder, val=None)
    attach(data)
    assert data.val_dataloader() == []


@pytest.mark.exhaustive
def test_the_built_in_text_and_a_tokenizer_of_ones_own(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train_bpe(["eins zwei drei"] * 9, 270, "x").to_serialized()["json"])
    data = TranslationDataModule(None, "de", "en", tokenizer=str(tmp_path / "tokenizer.json"), num_workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(data)
        batches = list(islice(iter(data.train_dataloader()), 3))
    assert [batch["n_positions"] for batch in batches] == [4096] * 3
    assert dict(data.describe())["text"] == "numbers written out (built in), de to en"
    assert len(data.training.pairs) == 20_000
    data.require_vocabulary(270)
    with pytest.raises(InputError, match=r"model\.vocab_size=262 is too small for the tokenizer tokenizer\.json"):
        data.require_vocabulary(262)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None, "source": "fr"}, "data.source='fr' is unknown: choose one of 'en', 'de'"),
        ({"tokens_per_batch": 100}, "data.tokens_per_batch=100 has no room for a pair of data.max_length=128"),
        ({"max_length": 1}, "data.max_length=1 must be 2 or more"),
        ({"target": "dee"}, "train.dee cannot be read (No such file or directory): set data.path to its folder. Did"),
        ({"vocab_size": 20}, "data.vocab_size=20 must be 259 or more"),
        ({"tokenizer": "nowhere.json"}, "data.tokenizer='nowhere.json' cannot be read"),
        ({"max_length": 2, "tokenizer": "bytes"}, "no pair that is neither empty nor longer than data.max_length"),
        ({"test": "few", "stage": "test", "world_size": 3}, "the test text has 2 pairs, but 3 devices need a pair"),
        ({"val": None, "stage": "validate"}, "data.val is null, so there is no val text"),
    ],
)
def test_mistakes_are_named(options, message, tmp_path):
    folder = write_pairs(tmp_path / "text", {**SIZES, "few": 2})
    of_trainer = {name: options.pop(name) for name in ("stage", "world_size") if name in options}

    def set_up():
        attach(TranslationDataModule(**options) if "path" in options else data_of(folder, **options), **of_trainer)

    with pytest.raises(InputError) as error:
        set_up()
    assert message in str(error.value)


def test_files_of_different_lengths_are_named_with_both_counts(tmp_path):
    folder = write_pairs(tmp_path / "text")
    with open(folder / "train.de", "a") as file:
        file.write("eins\n")
    with pytest.raises(InputError, match=r"train\.en has 60 lines and .*train\.de 61"):
        attach(data_of(folder))
