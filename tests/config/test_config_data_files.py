"""Which files a value of data.train names: sorted, each once, and one line when there are none."""

import pathlib

import pytest

from nereus_jax.config import find_data_files
from nereus_jax.core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name in (
        *("many/b.parquet", "many/a.parquet", "many/.hidden.parquet", "many/notes.txt"),
        *("many/below/c.parquet", "mixed/a.jsonl", "mixed/b.parquet", "none/x.txt"),
        *("one.jsonl", "odd,[name].jsonl", "data"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("one.jsonl", ["one.jsonl"]),
        ("data", ["data"]),
        ("many", ["many/a.parquet", "many/b.parquet"]),
        ("many/", ["many/a.parquet", "many/b.parquet"]),
        ("many/*.parquet", ["many/a.parquet", "many/b.parquet"]),
        ("many/**/*.parquet", ["many/a.parquet", "many/b.parquet", "many/below/c.parquet"]),
        ("many/[b-z]*t", ["many/b.parquet", "many/notes.txt"]),
        ("one.jsonl, many/b.parquet,many", ["many/a.parquet", "many/b.parquet", "one.jsonl"]),
        ("odd,[name].jsonl", ["odd,[name].jsonl"]),
    ],
)
def test_files_are_found(text: str, names: list[str]) -> None:
    assert [str(path) for path in find_data_files("data.train", text)] == names


def test_home_is_expanded(folder: pathlib.Path) -> None:
    assert find_data_files("data.train", "~/m*/a.parquet") == (folder / "many" / "a.parquet",)
    assert find_data_files("data.train", "~/one.jsonl") == (folder / "one.jsonl",)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("no.jsonl", ["expected a .jsonl, .jsonl.gz or .parquet file", "'no.jsonl'", "not exist"]),
        ("many/*.jsonl", ["'many/*.jsonl', which matches no file", "task:NAME"]),
        ("one.jsonl,no.jsonl", ["got 'no.jsonl', which does not exist"]),
        ("one.jsonl,", ["got '', which does not exist"]),
        ("none", ["the directory 'none' has no .jsonl, .jsonl.gz, .parquet file"]),
        ("mixed", ["files of several kinds (1 .jsonl, 1 .parquet)", "such as 'mixed/*.jsonl'"]),
        ("/dev/null", ["'/dev/null', which exists but is not such a thing"]),
    ],
)
def test_what_is_no_file_is_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_data_files("data.eval", text)
    assert "\n" not in str(caught.value)
    for part in ["data.eval: ", *parts]:
        assert part in str(caught.value)
