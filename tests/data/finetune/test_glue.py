"""The official files of GLUE and other tables: their rows, and what is wrong with them."""

import pytest

from linrope.data.finetune.examples import Example, find_file, read_lines
from linrope.data.finetune.glue import GLUE
from linrope.data.finetune.tsv import TableFormat, read_examples, read_table
from linrope.errors import InputError
from tests.conftest import assert_input_errors

HEADERS = {
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "sst2": "sentence\tlabel",
    "qnli": "index\tquestion\tsentence\tlabel",
    "stsb": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
}
"""First lines of the official training files."""
LABELS = {"mrpc": "1", "sst2": "1", "qnli": "not_entailment", "stsb": "3.250", "qqp": "1", "mnli": "neutral"}
TEST_HEADERS = {
    "mrpc": "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "sst2": "index\tsentence",
    "qqp": "id\tquestion1\tquestion2",
}


def row_of(header: str, form: TableFormat, label: str, id_: str = "7") -> str:
    known = {form.text: 'a "quoted text', form.pair: "an\x85other", form.label: label, form.id: id_}
    return "\t".join(known.get(name, f"<{name}>") for name in header.split("\t"))


@pytest.mark.parametrize("name", GLUE)
def test_the_official_columns_are_read_without_quoting(name, tmp_path):
    form, path = GLUE[name], tmp_path / "train.tsv"
    header = HEADERS[name]
    path.write_bytes(f"\ufeff{header}\r\n{row_of(header, form, LABELS[name])}\r\n".encode())
    (example,), n_skipped = read_examples(path, form, "part")
    texts = ('a "quoted text',) if form.pair is None else ('a "quoted text', "an\x85other")
    target = 3.25 if name == "stsb" else 1
    id_ = "7" if form.id in header.split("\t") else "0"
    assert (example, n_skipped) == (Example(id_, texts, target, "part"), 0)
    assert set(form.metrics) <= ({"pearson", "spearman"} if form.labels is None else {"accuracy", "f1"})


@pytest.mark.parametrize("name", TEST_HEADERS)
def test_files_without_labels_have_no_targets(name, tmp_path):
    path, header = tmp_path / "test.tsv", TEST_HEADERS[name]
    path.write_text(f"{header}\n{row_of(header, GLUE[name], '')}\n{row_of(header, GLUE[name], '', '8')}\n")
    examples, _ = read_examples(path, GLUE[name], labelled=False)
    assert [(example.id, example.target) for example in examples] == [("7", None), ("8", None)]


def test_only_qqp_leaves_out_rows_with_a_wrong_number_of_fields(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(f"{HEADERS['qqp']}\n1\t2\t3\ta\tb\t0\n4\t5\n6\t7\t8\tc\td\t1\n")
    examples, n_skipped = read_examples(path, GLUE["qqp"])
    assert [(example.texts, example.target) for example in examples] == [(("a", "b"), 0), (("c", "d"), 1)]
    assert n_skipped == 1
    path.write_text("sentence\tlabel\na\t0\nb\n")
    with pytest.raises(InputError, match=r"train\.tsv, line 3: it has 1 fields, and the first line 2"):
        read_examples(path, GLUE["sst2"])


def test_what_is_wrong_is_named_with_file_and_line(tmp_path):
    def written(data: bytes):
        path = tmp_path / "train.tsv"
        path.write_bytes(data)
        return path

    def read(data: bytes, name: str = "sst2", **options):
        return lambda: read_examples(written(data), GLUE[name], **options)

    stsb = f"{HEADERS['stsb']}\n{row_of(HEADERS['stsb'], GLUE['stsb'], '{}')}\n"
    assert_input_errors(
        (read(b""), r"train\.tsv is empty"),
        (read(b"\n \n"), r"train\.tsv is empty"),
        (read(b"sentence\tlabel\n"), r"train\.tsv has no rows below"),
        (read(b"sentence\nb\n"), r"has no column 'label': its first line names 'sentence'"),
        (read(b"sentences\tlabel\na\t0\n"), r"no column 'sentence': its first line names 'sentences', 'label'\. Did"),
        (read(b"sentence\tlabel\na\t0\nb\t2\n"), r"train\.tsv, line 3: the label '2' is unknown: .* '0', '1'"),
        (read(b"sentence\tlabel\na\t0\n\nb\t1\n"), r"train\.tsv, line 3: it has 1 fields, and the first line 2"),
        (read(b"sentence\tlabel\na\t0\n\xff\t1\n"), r"train\.tsv, line 3: it is not UTF-8"),
        (read(stsb.format("five").encode(), "stsb"), r"train\.tsv, line 2: the value 'five' of the column 'score'"),
        *(
            (
                read(stsb.format(value).encode(), "stsb"),
                rf"line 2: the value '{value}' .* is no finite number in float32",
            )
            for value in ("inf", "1e39", "-4e38", "1_0", "٣")
        ),
        (read(b"label\tsentence\tlabel\n0\ta\t1\n", labelled=False), r"train\.tsv has 2 columns 'label'"),
        (read(b"index\tsentence\tindex\tlabel\n0\ta\t0\t1\n"), r"train\.tsv has 2 columns 'index'"),
        (lambda: read_lines(tmp_path / "none.tsv"), r"none\.tsv cannot be read \(No such file"),
        (lambda: find_file(tmp_path / "no", "train", {"train": ["train.tsv"]}), r"does not exist: give .* train\.tsv"),
        (lambda: find_file(tmp_path, "train", {"train": ["a.txt", "b"]}), r"has no a\.txt or b: give the folder"),
    )


def test_files_are_found_in_a_folder_or_beside_the_training_file(tmp_path):
    names = {"train": ["train.tsv"], "val": ["dev.tsv", "valid.tsv"], "test": ["test.tsv"]}
    for name in ("valid.tsv", "mine.tsv", "train.tsv"):
        (tmp_path / name).touch()
    splits = ("train", "val", "test")
    found = [find_file(tmp_path, split, names) for split in splits]
    assert found == [tmp_path / "train.tsv", tmp_path / "valid.tsv", None]
    found = [find_file(tmp_path / "mine.tsv", split, names) for split in splits]
    assert found == [tmp_path / "mine.tsv", tmp_path / "valid.tsv", None]


def test_a_table_gives_its_columns(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("a\tb\n1\t\n2\tx y\n\n")
    table = read_table(path, ["b"])
    assert (table.column("a"), table.column("b"), table.n_skipped) == (["1", "2"], ["", "x y"], 0)
