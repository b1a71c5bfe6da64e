"""The files of a checkpoint directory, as far as they can be told without jax.

A directory is looked at before any device is, so that a wrong one costs nothing.
"""

import json
import os
import re
import shutil
from pathlib import Path

from nereus_jax.core.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""The directory in that of a run."""
MODEL_FILE = "model.json"
STEPS, FROZEN = "steps", "frozen"
DELETED = "deleted"
UNFINISHED = ".orbax-checkpoint-tmp"


def finished_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps whose checkpoints are whole, in order. Looks at names only."""
    return numbered(Path(directory) / STEPS)


def check_directory(directory: str | os.PathLike[str], fingerprint: str) -> None:
    """Refuses a directory with checkpoints of another model. Reads one small file, needs no device.

    Args:
      directory: where the run keeps its checkpoints; it may not exist yet.
      fingerprint: identifies the model; short and readable, since it is shown.

    Raises:
      CheckpointError: the checkpoints are another model's, or it is not known whose they are.
    """
    directory = Path(directory)
    if not finished_steps(directory):
        return
    try:
        found = json.loads((directory / MODEL_FILE).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / MODEL_FILE} cannot be read ({reason(error)}), so it is not known which "
            f"model the checkpoints beside it belong to; use another workdir"
        ) from error
    if found != fingerprint:
        raise CheckpointError(
            f"{directory} holds checkpoints of another model: {found}, and this run's is "
            f"{fingerprint}; use another workdir, or the configuration that wrote them"
        )


def prepare_directory(directory: Path, fingerprint: str) -> None:
    """Creates what is missing and removes what is unfinished. One process does it."""
    for name in (STEPS, FROZEN):
        (directory / name).mkdir(parents=True, exist_ok=True)
        sweep(directory / name)
    path, text = directory / MODEL_FILE, json.dumps({"fingerprint": fingerprint})
    if not path.exists() or path.read_text() != text:  # a full disk can still be resumed from
        _write_whole(path, text)


def numbered(root: Path) -> list[int]:
    """The directories whose names are numbers, in order: finished checkpoints."""
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


def sweep(root: Path) -> None:
    """Removes what is unfinished or to be deleted; nobody may be writing there."""
    for path in root.iterdir():
        if path.name == DELETED or UNFINISHED in path.name:
            shutil.rmtree(path, ignore_errors=True)


def _write_whole(path: Path, text: str) -> None:
    """Replaces a file at once: a reader sees the old text or the new, never a part."""
    partial = path.with_suffix(".tmp")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def reason(error: BaseException) -> str:
    """One short line out of an error of orbax or the operating system."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, OSError) and root.strerror:
        return f"{root.filename}: {root.strerror}" if root.filename else root.strerror
    text = " ".join(str(root).split())
    code = re.search(r"\[os_error_code='(\d+)'\]", text)
    paths = re.findall(r'"(/[^"]*)"', text)
    if code and paths:
        return f"{paths[-1].rstrip(chr(92))}: {os.strerror(int(code.group(1)))}"
    text = re.split(r" \[\w+='", text)[0]
    return text if len(text) <= 200 else "... " + text[-200:]
