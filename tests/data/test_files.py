"""Problems of data files: the same from JSONL and Parquet, and one line about what is wrong."""

import datetime
import decimal
import gzip
import json
import pathlib
import sys
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.data import parquet
from nereus_jax.data.files import ChainedProblems, JsonlProblems, open_problems
from nereus_jax.data.parquet import ParquetProblems
from nereus_jax.data.prompts import PromptStream
from nereus_jax.data.records import RecordSchema
from nereus_jax.data.tasks import Problem
from nereus_jax.data.tokenizers import CharacterTokenizer

SCHEMA = RecordSchema()
VERL = RecordSchema(answer_field="reward_model.ground_truth")
GOOD = {"prompt": "p", "answer": "a"}
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


def write_jsonl(path: pathlib.Path, *lines: object) -> pathlib.Path:
    text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def write_parquet(path: pathlib.Path, *rows: dict[str, Any], **options: Any) -> pathlib.Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, **options)
    return path


def message_of(path: pathlib.Path, schema: RecordSchema = SCHEMA) -> str:
    with pytest.raises(DataError) as caught:
        open_problems([path], schema)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------- JSONL


def test_jsonl_keeps_order_skips_blank_lines_and_reads_fields(tmp_path):
    rows = [{"prompt": f"p{i} é", "answer": f"#### {i}", "extra": i} for i in range(3)]
    lines = (rows[0], "", rows[1], "   ", rows[2], "")
    for name in ("x.jsonl", "x.jsonl.gz"):
        problems = JsonlProblems(write_jsonl(tmp_path / name, *lines), SCHEMA)
        assert len(problems) == 3
        for i in (2, 0, 1):
            problem = Problem(prompt=f"p{i} é", answer=f"#### {i}", metadata=rows[i])
            assert problems[i] == problem
        with pytest.raises(IndexError):
            problems[3]


def test_jsonl_with_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n{"prompt": "c", "answer": "d"}\r\n'
    )
    problems = JsonlProblems(path, SCHEMA)
    assert [problems[i].prompt for i in range(len(problems))] == ["a", "c"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, '{"prompt": '), "x.jsonl: line 2: not JSON"),
        ((GOOD, "", "[1]"), "line 3: must be a JSON object, got list"),
        ((GOOD, "[" * 100_000), "line 2: not JSON"),
        (({"question": "p", "answer": "a"},), "line 1: no field 'prompt'; its fields: question, a"),
        (({"Prompt": "p", "answer": "a"},), "no field 'prompt' (did you mean 'Prompt'?)"),
        (({"prompt": "p", "answers": "a"},), "did you mean 'answers'?); its fields: prompt, answ"),
        (({"prompt": "p", "answers": "a"},), "set data.answer_field"),
        (({"prompt": None, "answer": "a"},), "field 'prompt' is null"),
        (({"prompt": [1], "answer": "a"},), "'prompt' must be text or a list of messages, got [1]"),
        (({"prompt": [], "answer": "a"},), "'prompt' must be text or a list of messages, got []"),
        ((), "is empty; data needs at least one problem"),
        (("", " "), "is empty"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, lines, message):
    assert message in message_of(write_jsonl(tmp_path / "x.jsonl", *lines))


def test_jsonl_missing_not_utf8_and_not_gzipped(tmp_path):
    assert "does not exist" in message_of(tmp_path / "none.jsonl")
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "a"}')
    assert "line 1: not JSON" in message_of(path)
    for content in (b'{"prompt": "p"}', gzip.compress(b"x" * 9999)[:-20], b""):
        packed = tmp_path / "x.jsonl.gz"
        packed.write_bytes(content)
        assert ("cannot be unpacked" in message_of(packed)) == bool(content)


# ------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((145.0, "145"), (0.5, "0.5"), (7, "7"), ("145.0", "145.0"), (True, "true")),
        *((["é"], '["é"]'), ({"a": 1}, '{"a": 1}')),
    ],
)
def test_answers_become_text(tmp_path, value, text):
    row = {"Body": "Two pens.", "Question": "How many?", "Answer": value}
    schema = RecordSchema(prompt_field="Body+Question", answer_field="Answer")
    for path in (
        write_jsonl(tmp_path / "x.jsonl", row),
        write_parquet(tmp_path / "x.parquet", row),
    ):
        problem = open_problems([path], schema)[0]
        assert problem.prompt == "Two pens. How many?"
        assert problem.answer == text


def test_answers_of_types_that_only_parquet_has(tmp_path):
    rows = [{"prompt": "p", "answer": decimal.Decimal(x)} for x in ("42.00", "-1.50")]
    problems = ParquetProblems(write_parquet(tmp_path / "x.parquet", *rows), SCHEMA)
    assert [problems[i].answer for i in range(2)] == ["42", "-1.5"]
    for value in (datetime.date(2020, 1, 1), b"a"):
        path = write_parquet(tmp_path / "x.parquet", {"prompt": "p", "answer": value})
        assert "row 0 (the first is 0): field 'answer' must be text, a number" in message_of(path)


def test_nested_fields_and_no_answers(tmp_path):
    row = {"a": {"b": {"c": "deep"}}, "a.b": "flat", "x": 1}
    path = write_jsonl(tmp_path / "x.jsonl", row)
    read = open_problems([path], RecordSchema(prompt_field="a.b.c", answer_field="x"))[0]
    assert (read.prompt, read.answer) == ("deep", "1")
    assert open_problems([path], RecordSchema(prompt_field="a.b", answer_field=""))[0] == Problem(
        prompt="flat", answer="", metadata=row
    )
    message = message_of(path, RecordSchema(prompt_field="a.b.d", answer_field="x"))
    assert "in 'a': in 'b': no field 'd'" in message
    assert "its fields: c" in message
    message = message_of(path, RecordSchema(prompt_field="x.y", answer_field=""))
    assert "field 'x' must be an object with the field 'y', got 1" in message


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user"}], "message 0 needs the text 'content', got {'role': 'user'"),
        ([*CHAT, {"role": None, "content": "x"}], "message 2 needs the text 'role'"),
        (
            [*CHAT, {"role": "assistant", "content": "2"}],
            "the last message is the assistant's, '2'",
        ),
    ],
)
def test_malformed_messages(tmp_path, messages, says):
    row = {"prompt": messages, "answer": "2"}
    good = {"prompt": CHAT, "answer": "2"}
    jsonl = message_of(write_jsonl(tmp_path / "x.jsonl", good, row))
    assert "line 2: field 'prompt'" in jsonl and says in jsonl
    table = message_of(write_parquet(tmp_path / "x.parquet", good, row))
    assert "row 1 (the first is 0): field 'prompt'" in table
    if len(messages) > 1:  # a Parquet message has every key of the others
        assert says in table


# ------------------------------------------------------------------------------------- Parquet


def verl_rows(count: int) -> list[dict[str, Any]]:
    """Rows as verl prepares GSM8K: https://verl.readthedocs.io/en/latest/preparation/prepare_data.html"""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [*CHAT[:1], {"role": "user", "content": f"{i}+1"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(count)
    ]


class ChatTokenizer(CharacterTokenizer):
    def __init__(self) -> None:
        super().__init__("".join(map(chr, range(32, 127))))

    def render_chat(self, messages):
        return "".join(f"<{m['role']}:{m['content']}>" for m in messages)


def test_parquet_and_jsonl_give_the_same_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_BATCH_ROWS", 7)
    rows = verl_rows(50)
    sources = [
        [write_jsonl(tmp_path / "x.jsonl", *rows)],
        [write_jsonl(tmp_path / "x.jsonl.gz", *rows)],
        [write_parquet(tmp_path / "x.parquet", *rows, row_group_size=9)],
        [write_parquet(tmp_path / "y.parquet", *rows, compression="zstd", use_dictionary=False)],
        [
            write_parquet(tmp_path / "1.parquet", *rows[:20]),
            write_parquet(tmp_path / "2.parquet", *rows[20:21]),
            write_jsonl(tmp_path / "3.jsonl", *rows[21:]),
        ],
    ]
    taken = []
    for paths in sources:
        problems = open_problems(paths, VERL)
        assert [problems[i].metadata for i in range(50)] == rows
        options = {"seed": 5, "max_prompt_length": 64, "chat_template": True}
        taken.append(PromptStream(problems, ChatTokenizer(), **options).take(30, 60))
    assert all(t == taken[0] for t in taken)
    first = taken[0].samples[0]
    assert first.text == f"<system:be brief><user:{first.prompt}>"
    assert first.prompt == f"{int(first.answer) - 1}+1"


def test_a_row_is_read_where_it_lies_and_the_copy_has_no_name(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    path = write_parquet(tmp_path / "x.parquet", *verl_rows(10_000), row_group_size=10_000)
    before = pa.total_allocated_bytes()
    problems = ParquetProblems(path, VERL)
    assert pa.total_allocated_bytes() - before < 100_000  # the rows take 1.4 MB
    assert not list(scratch.iterdir())
    path.unlink()
    assert [problems[i].answer for i in (9_999, 0, 5_000)] == ["10000", "1", "5001"]
    for index in (10_000, -1):
        with pytest.raises(IndexError):
            problems[index]


def test_metadata_of_types_that_python_lacks_becomes_text(tmp_path):
    table = pa.table(
        {
            "prompt": pa.array(["p"]).dictionary_encode(),
            "answer": pa.array([1], pa.float32()),
            "at": pa.array([1], pa.timestamp("ns")),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    problem = ParquetProblems(tmp_path / "x.parquet", SCHEMA)[0]
    assert (problem.prompt, problem.answer) == ("p", "1")
    assert problem.metadata["at"].endswith("00.000000001")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"question": "p", "answer": "a"}], "no column 'prompt'; its columns: question, answer;"),
        ([{"Prompt": "p", "answer": "a"}], "no column 'prompt' (did you mean 'Prompt'?)"),
        ([{"prompt": "p", "answers": "a"}], "set data.answer_field"),
        ([GOOD, {"prompt": None, "answer": "a"}], "row 1 (the first is 0): field 'prompt' is null"),
        ([{"prompt": 3, "answer": "a"}], "'prompt' must be text or a list of messages, got 3"),
    ],
)
def test_parquet_errors_name_the_column_or_the_row(tmp_path, rows, says):
    assert says in message_of(write_parquet(tmp_path / "x.parquet", *rows))


def test_parquet_files_that_are_none(tmp_path):
    assert "does not exist" in message_of(tmp_path / "none.parquet")
    path = write_parquet(tmp_path / "x.parquet", *verl_rows(2000))
    content = bytearray(path.read_bytes())
    for damage in (b"", b"PAR1" + bytes(99), content[:-100], content[100:]):
        path.write_bytes(damage)
        assert "cannot be read as Parquet" in message_of(path, VERL)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert "no column 'answer'" in message_of(path)
    pq.write_table(pa.table({n: pa.array([], pa.string()) for n in GOOD}), path)
    assert "is empty" in message_of(path)


def test_no_room_for_the_copy_says_where(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", GOOD)
    real_file = pa.OSFile
    monkeypatch.setattr(pa, "OSFile", lambda name, mode: real_file("/dev/full", mode))
    assert "set TMPDIR to a directory with more room" in message_of(path)


def test_pyarrow_is_imported_for_a_parquet_file_only(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", GOOD)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    open_problems([write_jsonl(tmp_path / "x.jsonl", GOOD)], SCHEMA)
    with pytest.raises(
        ConfigError, match=r"x\.parquet needs the package pyarrow; install .*\[parq"
    ):
        open_problems([path], SCHEMA)


# ------------------------------------------------------------------------------------- many files


def test_problems_of_many_files_are_chained(tmp_path):
    files = [
        write_jsonl(
            tmp_path / f"{i}.jsonl", *[{"prompt": f"{i}{j}", "answer": ""} for j in range(i)]
        )
        for i in range(4)
    ]
    problems = open_problems(files, SCHEMA)
    assert isinstance(problems, ChainedProblems)
    assert [problems[i].prompt for i in range(len(problems))] == [
        "10",
        "20",
        "21",
        "30",
        "31",
        "32",
    ]
    for index in (6, -1):
        with pytest.raises(IndexError):
            problems[index]
    with pytest.raises(DataError, match=r"all 2 files from .*0\.jsonl on are empty"):
        open_problems([files[0], files[0]], SCHEMA)
    assert len(ChainedProblems([])) == 0
