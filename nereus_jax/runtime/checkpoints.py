"""Checkpoints of a run: written beside training, whole or not at all, the last few kept.

    DIRECTORY/model.json      whose checkpoints these are
    DIRECTORY/steps/STEP/     a whole checkpoint: `arrays` (orbax, OCDBT), `meta` and `checksums`
    DIRECTORY/frozen/0/       arrays that the run never changes (the reference model), once

Everything is written under another name and renamed when it is complete, and renamed before it is
deleted: a process that is killed leaves the finished checkpoints as they were, and rubbish that the
next run removes. The state is layout-free (see `checkpoint_arrays`).

With several processes every process calls every method in the same order, and all see the same file
system. A process that could not write raises; the others cannot go on without it.
"""

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nereus_jax.core.errors import CheckpointError, StorageError
from nereus_jax.runtime import host
from nereus_jax.runtime.checkpoint_arrays import (
    Tree,
    checksums,
    differences,
    flatten,
    handler,
    restore_args,
    save_args,
    unflatten,
)
from nereus_jax.runtime.checkpoint_files import (
    DELETED,
    FROZEN,
    STEPS,
    check_directory,
    finished_steps,
    numbered,
    prepare_directory,
    reason,
    sweep,
)
from nereus_jax.runtime.checkpoint_noise import quiet, stay_quiet

ARRAYS, META, CHECKSUMS = "arrays", "meta", "checksums"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Subject:
    """What a message is about, and what helps when it cannot be read."""

    name: str
    remedy: str


class CheckpointStore:
    """The checkpoints of one run in one directory."""

    def __init__(self, directory: str | os.PathLike[str], *, keep: int, fingerprint: str) -> None:
        """Opens the directory, creates it if need be, and removes what a killed run left.

        Args:
          directory: of the checkpoints, on the local file system.
          keep: how many of the newest checkpoints stay; at least 1.
          fingerprint: of the model, see `check_directory`.

        Raises:
          CheckpointError: the directory holds checkpoints of another model.
          StorageError: the directory cannot be written.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._directory = Path(directory).absolute()
        check_directory(self._directory, fingerprint)
        self._saving: int | None = None
        with host.together():
            try:
                if jax.process_index() == 0:
                    prepare_directory(self._directory, fingerprint)
            except OSError as error:
                raise StorageError(
                    f"no checkpoint can be written in {self._directory}: {reason(error)}; use "
                    f"another workdir or set its permissions"
                ) from error
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet())
        self._has_failed = False
        self._keep = keep
        self._steps = _manager(self._directory / STEPS, keep)
        self._frozen = _manager(self._directory / FROZEN, 1)

    def latest_step(self) -> int | None:
        """The newest whole checkpoint; the same answer on every process."""
        steps = json.loads(host.broadcast_text(json.dumps(finished_steps(self._directory))))
        return steps[-1] if steps else None

    def save(self, step: int, arrays: Tree, meta: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint; the arrays may be donated or deleted as soon as it returns.

        Blocks for the copy to host memory, and for the end of the save before.

        Args:
          step: names the checkpoint; greater than every one before.
          arrays: global arrays.
          meta: what else belongs to the state, as JSON.

        Raises:
          StorageError: this checkpoint or the one before could not be written.
          CheckpointError: the directory holds this step or a later one already.
        """
        self.wait()
        steps = finished_steps(self._directory)
        if steps and step <= steps[-1]:
            raise CheckpointError(
                f"step {step} is not after step {steps[-1]}, the newest checkpoint in "
                f"{self._directory}; resume from there, or use another workdir"
            )
        items = _items(arrays, meta)
        self._saving = step
        with self._writing():
            self._steps.reload()  # a damaged one may have been deleted meanwhile
            self._steps.save(step, args=items, force=True)

    def wait(self) -> None:
        """Blocks until the checkpoint that was started last is whole.

        Raises:
          StorageError: it could not be written. The finished ones are not touched.
        """
        with self._writing():
            self._steps.wait_until_finished()
        self._saving = None
        self._clean(STEPS)

    def close(self) -> None:
        """Waits, and gives threads and files back.

        Raises:
          StorageError: as in `wait`.
        """
        try:
            self.wait()
        finally:
            self._steps.close()
            self._frozen.close()
            self._quiet.close()
            if self._has_failed:
                stay_quiet()

    def read_meta(self, step: int) -> dict[str, Any]:
        """The `meta` of a checkpoint.

        Raises:
          CheckpointError: it is missing or cannot be read.
        """
        with _reading(self._subject(step)):
            args = ocp.args.Composite(**{META: ocp.args.JsonRestore()})
            item = self._steps.restore(step, args=args)[META]
            if item["crc32"] != _crc32(item["meta"]):
                raise ValueError("the meta data have other values than were saved")
            return item["meta"]

    def restore(self, step: int, abstract: Tree) -> Tree:
        """Reads a checkpoint's arrays onto any layout.

        Args:
          step: of a whole checkpoint.
          abstract: `jax.ShapeDtypeStruct`s with shardings; shapes are padded for their meshes.

        Raises:
          CheckpointError: it is missing, cannot be read, or does not hold these arrays.
        """
        return _restore(self._steps, step, abstract, self._subject(step))

    def has_frozen(self) -> bool:
        """Whether the frozen arrays are there, whole; the same answer on every process."""
        found = bool(numbered(self._directory / FROZEN))
        return json.loads(host.broadcast_text(json.dumps(found)))

    def save_frozen(self, arrays: Tree) -> None:
        """Writes the arrays that the run never changes, before its first checkpoint; blocks.

        What an earlier start left here is replaced.

        Raises:
          StorageError: they could not be written.
          CheckpointError: there are checkpoints already, which need those that are here.
        """
        steps = finished_steps(self._directory)
        if steps:
            raise CheckpointError(
                f"{self._directory} holds checkpoints up to step {steps[-1]} and the frozen model "
                f"that belongs to them; resume from there, or use another workdir"
            )
        items = _items(arrays, {})
        with self._writing(FROZEN):
            if self._frozen.all_steps():
                self._frozen.delete(0)
            self._frozen.save(0, args=items, force=True)
            self._frozen.wait_until_finished()
        self._clean(FROZEN)

    def restore_frozen(self, abstract: Tree) -> Tree:
        """Reads the frozen arrays onto any layout; see `restore`.

        Raises:
          CheckpointError: they are missing, cannot be read, or are others.
        """
        subject = _Subject(
            name=f"the frozen model in {self._directory / FROZEN}",
            remedy="put a copy of it back, or start in another workdir",
        )
        if not self.has_frozen():
            raise CheckpointError(f"{subject.name} is missing; {subject.remedy}")
        return _restore(self._frozen, 0, abstract, subject)

    def _subject(self, step: int) -> _Subject:
        steps = finished_steps(self._directory)
        if step not in steps:
            held = f"those of steps {steps}" if steps else "none"
            raise CheckpointError(
                f"{self._directory} holds no checkpoint of step {step}, only {held}; "
                f"choose one of them or use another workdir"
            )
        before = [s for s in steps if s < step]
        then = f"to resume from step {before[-1]}" if before else "to start anew, there is no other"
        return _Subject(
            name=f"the checkpoint of step {step} in {self._directory}",
            remedy=f"delete {self._directory / STEPS / str(step)} {then}",
        )

    def _clean(self, name: str) -> None:
        if jax.process_index() == 0:
            sweep(self._directory / name)

    def _reopen(self, name: str) -> None:
        """Forgets a failed save: orbax would report it again, and count its checkpoint as kept."""
        with contextlib.suppress(OSError, ValueError):
            (self._steps if name == STEPS else self._frozen).close()
        self._clean(name)
        if name == STEPS:
            self._steps = _manager(self._directory / STEPS, self._keep)
        else:
            self._frozen = _manager(self._directory / FROZEN, 1)

    @contextlib.contextmanager
    def _writing(self, name: str = STEPS) -> Iterator[None]:
        """Turns what orbax raises when it cannot write into one line."""
        try:
            yield
        except (OSError, ValueError) as error:  # tensorstore raises ValueError on a full disk
            what = f"the checkpoint of step {self._saving}" if name == STEPS else "the frozen model"
            self._saving = None
            self._has_failed = True
            self._reopen(name)
            steps = finished_steps(self._directory)
            last = f"the last good one is step {steps[-1]}" if steps else "there is none before it"
            raise StorageError(
                f"{what} could not be written in {self._directory}: {reason(error)}; {last}; free "
                f"disk space or use another workdir, and start again to resume"
            ) from error


def _manager(root: Path, keep: int) -> ocp.CheckpointManager:
    arrays, meta = handler(), ocp.JsonCheckpointHandler()
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add(ARRAYS, ocp.args.PyTreeSave, arrays)
    handlers.add(ARRAYS, ocp.args.PyTreeRestore, arrays)
    for item in (META, CHECKSUMS):
        handlers.add(item, ocp.args.JsonSave, meta)
        handlers.add(item, ocp.args.JsonRestore, meta)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        # Renamed first: a kill while files are deleted one by one leaves no step that looks whole.
        todelete_subdir=DELETED,
        create=False,
        save_root_metadata=False,
        lightweight_initialize=True,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            barrier_sync_key_prefix=root.name
        ),
    )
    return ocp.CheckpointManager(root, options=options, handler_registry=handlers)


def _items(arrays: Tree, meta: Mapping[str, Any]) -> ocp.args.Composite:
    flat = flatten(arrays)
    stored = json.loads(json.dumps(dict(meta)))  # keys are strings from here on
    items = {
        ARRAYS: save_args(flat),
        META: ocp.args.JsonSave({"meta": stored, "crc32": _crc32(stored)}),
        CHECKSUMS: ocp.args.JsonSave(checksums(flat)),
    }
    return ocp.args.Composite(**items)


def _crc32(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _restore(manager: ocp.CheckpointManager, step: int, abstract: Tree, subject: _Subject) -> Tree:
    wanted = flatten(abstract)
    with _reading(subject):
        stored = manager.item_metadata(step)[ARRAYS]
        if stored is None:
            raise FileNotFoundError("the list of its arrays is missing")
        wrong = differences(dict(stored.tree), wanted)
        if wrong:
            raise CheckpointError(
                f"{subject.name} does not fit this run: {wrong}; resume with the configuration "
                f"that wrote it, or use another workdir"
            )
        items = {ARRAYS: restore_args(wanted), CHECKSUMS: ocp.args.JsonRestore()}
        restored = manager.restore(step, args=ocp.args.Composite(**items))
        flat, sums = restored[ARRAYS], checksums(restored[ARRAYS])
        damaged = [name for name in flat if sums[name] != restored[CHECKSUMS].get(name)]
        if damaged:
            raise ValueError(f"{damaged[0]} has other values than were saved")
    return unflatten(abstract, flat)


@contextlib.contextmanager
def _reading(subject: _Subject) -> Iterator[None]:
    """Turns what orbax raises when it cannot read into one line."""
    try:
        yield
    except (CheckpointError, jax.errors.JaxRuntimeError):
        raise  # the devices' trouble (out of memory) is not the checkpoint's
    except Exception as error:  # orbax wraps tensorstore's errors in plain `Exception`s
        raise CheckpointError(
            f"{subject.name} cannot be read: {reason(error)}; {subject.remedy}"
        ) from error
