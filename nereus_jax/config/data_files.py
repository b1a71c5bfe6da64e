"""Which files a value of `data.train` or `data.eval` names."""

import glob
from collections import Counter
from pathlib import Path

from nereus_jax.core.errors import ConfigError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
"""Names of files that a directory is searched for."""

_EXPECTED = (
    f"expected a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file, a directory or a glob of them, "
    "several of these with commas, or 'task:NAME'"
)


def find_data_files(key: str, text: str) -> tuple[Path, ...]:
    """The files that `text` names, each once, sorted by path.

    `text` is a file, a directory (its files with one of `SUFFIXES`, not those of its
    subdirectories), a glob (`**` for any depth), or several of these with commas between them. A
    file or directory of exactly that name comes first, whatever signs it contains.

    Args:
      key: under which `text` is configured, for messages.
      text: the value.

    Raises:
      ConfigError: a path does not exist, a glob matches no file, or a directory has no such file or
        files of several kinds.
    """
    parts = [text] if Path(text).expanduser().exists() else text.split(",")
    found = {path for part in parts for path in _files_of(key, part.strip())}
    return tuple(sorted(found, key=str))


def _files_of(key: str, text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_file():
        return [path]
    if text and path.is_dir():
        return _files_in(key, path)
    if glob.has_magic(text) and not path.exists():
        matches = [Path(m) for m in glob.glob(str(path), recursive=True)]
        files = [m for m in matches if m.is_file()]
        if files:
            return files
        wrong = "matches no file"
    else:
        wrong = "exists but is not such a thing" if text and path.exists() else "does not exist"
    raise ConfigError(
        f"{key}: {_EXPECTED}, got {text!r}, which {wrong} (looked for {str(path.absolute())!r}); "
        f"set config.{key} to an existing one"
    )


def _files_in(key: str, directory: Path) -> list[Path]:
    pattern = glob.escape(str(directory)) + "/*"
    files = [Path(m) for m in glob.glob(pattern) if m.endswith(SUFFIXES) and Path(m).is_file()]
    kinds = Counter(f.suffix for f in files)  # the suffix of x.jsonl.gz is .gz
    if len(kinds) == 1:
        return files
    counts = ", ".join(f"{n} {suffix}" for suffix, n in sorted(kinds.items()))
    has = f"files of several kinds ({counts})" if files else f"no {', '.join(SUFFIXES)} file"
    example = f"{directory}/*{min(kinds, default='*')}"
    raise ConfigError(
        f"{key}: the directory {str(directory)!r} has {has}; set config.{key} to a directory with "
        f"files of one kind, or to a glob such as {example!r}"
    )
