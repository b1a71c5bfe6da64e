"""Carrying out a transition graph: units in, units out, in one order on every process.

Operations of one kind and model-stage that follow each other and do not wait for each other are one
batch, and a batch that moves anything is one transfer. Batches are dispatched from one thread in
the graph's order; those on other devices run at the same time. An operation's old units are given
up when it has been dispatched: the backend frees a buffer when what reads it has run.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from nereus_jax.core.devices import DeviceId
from nereus_jax.core.errors import TransitionError
from nereus_jax.core.roles import ModelStage
from nereus_jax.core.timeline import Span
from nereus_jax.core.transition import Operation, OperationKind, TransitionGraph, Unit
from nereus_jax.runtime.dispatch import MAX_IN_FLIGHT
from nereus_jax.runtime.emu import ElasticModelUnit
from nereus_jax.runtime.faults import lost_error
from nereus_jax.runtime.parking import block_in_memory, is_parked
from nereus_jax.runtime.transfers import Transfer
from nereus_jax.runtime.world import World

MOVES = frozenset(
    {OperationKind.SPLIT, OperationKind.MERGE, OperationKind.EXTEND, OperationKind.RESHARD}
)
"""Kinds that are carried out by a transfer."""

UnitsByStage = dict[ModelStage, dict[Unit, ElasticModelUnit]]


class TransitionStopped(TransitionError):
    """A transition stopped before its end.

    Attributes:
      units: what exists of each model-stage, and is intact.
      operations: how many of the graph's operations had been carried out.
      lost: devices whose blocks are gone.
    """

    def __init__(
        self,
        message: str,
        units: UnitsByStage,
        operations: int,
        lost: frozenset[DeviceId] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.units = units
        self.operations = operations
        self.lost = lost

    def to_lists(self) -> dict[ModelStage, list[ElasticModelUnit]]:
        """The units as `execute` takes them."""
        return {stage: list(held.values()) for stage, held in self.units.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Operations that are carried out together.

    Attributes:
      operations: their places in the graph.
      kind: of all of them.
      model_stage: whose units.
      sources: units that they read or consume, each once.
      consumed: those that cease to exist.
      targets: units that they produce.
    """

    operations: tuple[int, ...]
    kind: OperationKind
    model_stage: ModelStage
    sources: tuple[Unit, ...]
    consumed: tuple[Unit, ...]
    targets: tuple[Unit, ...]

    @property
    def moves(self) -> bool:
        """Whether a transfer carries it out."""
        return self.kind in MOVES or (self.kind is OperationKind.UNPARK and not self._stays)

    @property
    def _stays(self) -> bool:
        """Whether every new unit is where and as an old one is, but for the kind of memory."""
        old, new = (
            [(u.pp, u.tp, u.devices) for u in units] for units in (self.consumed, self.targets)
        )
        return old == new

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model_stage}"


def batches(graph: TransitionGraph) -> tuple[Batch, ...]:
    """The operations of a graph in dispatch order, put together where they can be."""
    groups: list[list[int]] = []
    for i, operation in enumerate(graph.operations):
        last = groups[-1] if groups else []
        joins = last and _join(operation, [graph.operations[j] for j in last])
        if joins and set(last).isdisjoint(graph.predecessors(i)):
            last.append(i)
        else:
            groups.append([i])
    return tuple(_batch(graph, tuple(group)) for group in groups)


def _join(operation: Operation, others: Sequence[Operation]) -> bool:
    """Whether an operation can be one with others: alike, and the units of each end together are
    one replica after the other on devices of their own, as those of a DP group are."""

    def form(operation: Operation) -> tuple[object, ...]:
        sources = {(u.pp, u.tp, u.parked) for u in _sources(operation)}
        targets = {(u.pp, u.tp, u.parked) for u in operation.produces}
        return operation.kind, operation.model_stage, sources, targets, operation.source

    if form(operation) != form(others[0]):
        return False
    every = (*others, operation)
    ends = {u for o in every for u in _sources(o)}, [u for o in every for u in o.produces]
    taken = ([d for u in units for d in u.devices] for units in ends)
    return all(len(set(devices)) == len(devices) for devices in taken)


def _sources(operation: Operation) -> tuple[Unit, ...]:
    return *operation.reads, *operation.consumes


def _batch(graph: TransitionGraph, group: tuple[int, ...]) -> Batch:
    operations = [graph.operations[i] for i in group]
    consumed = dict.fromkeys(u for o in operations for u in o.consumes)
    return Batch(
        operations=group,
        kind=operations[0].kind,
        model_stage=operations[0].model_stage,
        sources=tuple(dict.fromkeys(u for o in operations for u in _sources(o))),
        consumed=tuple(consumed),
        targets=tuple(u for o in operations for u in o.produces),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executed:
    """What a transition made.

    Attributes:
      units: of each model-stage, as the target plan has them.
      spans: when each batch ran, and the bytes that it moved.
    """

    units: UnitsByStage
    spans: tuple[Span, ...]


def execute(
    world: World,
    graph: TransitionGraph,
    units: dict[ModelStage, list[ElasticModelUnit]],
    transfers: Mapping[int, Transfer],
    *,
    step: int,
    first: int = 0,
    restore: Callable[[Batch], Sequence[ElasticModelUnit]] | None = None,
    observe: Callable[[Batch], None] | None = None,
) -> Executed:
    """Carries out a transition.

    Args:
      world: the devices.
      graph: what is to be done.
      units: what there is, given up: the mapping is emptied. Of a model-stage that is not named
        nothing is carried out. Whoever keeps another reference keeps the memory.
      transfers: for each batch that moves, by its first operation.
      step: recorded in the spans.
      first: operations before it have been carried out, by a transition that stopped.
      restore: reads the units of a RESTORE.
      observe: called before each batch.

    Raises:
      TransitionStopped: an operation failed, or blocks are gone; the cause is chained, what is
        left is in the error.
    """
    held: UnitsByStage = {stage: {u.unit: u for u in of_stage} for stage, of_stage in units.items()}
    units.clear()
    timer = _Timer(step)
    done = first
    try:
        for batch in (b for b in batches(graph) if b.operations[0] >= first):
            if observe is not None:
                observe(batch)
            if batch.model_stage in held:
                start_s = time.time()
                made = _carry_out(batch, held[batch.model_stage], transfers, restore)
                moved = sum(graph.operations[i].link_bytes.wire for i in batch.operations)
                timer.add(batch, start_s, made, moved)
                timer.let_go(batch.consumed)
                for unit in batch.consumed:
                    held[batch.model_stage].pop(unit, None)
                held[batch.model_stage] |= {u.unit: u for u in made}
                del made
            done += len(batch.operations)
        spans = timer.finish()
        _check_intact(held, graph)
    except Exception as error:
        timer.abandon()
        whole = {
            stage: {unit: x for unit, x in of_stage.items() if _is_ready(x)}
            for stage, of_stage in held.items()
        }
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TransitionStopped(
            f"the transition stopped at operation {done} of {len(graph.operations)}: {reason}",
            whole,
            done,
            _deleted(held, graph),
        ) from error
    return Executed(units=held, spans=spans)


def _check_intact(held: UnitsByStage, graph: TransitionGraph) -> None:
    """A unit that no operation touched may have lost blocks meanwhile."""
    lost = _deleted(held, graph)
    if lost:
        raise lost_error(lost)


def _deleted(held: UnitsByStage, graph: TransitionGraph) -> frozenset[DeviceId]:
    """Devices whose blocks are gone, beside those of which the graph knows it."""
    units = [unit for of_stage in held.values() for unit in of_stage.values()]
    blocks = [(d, x) for unit in units for leaf in unit.blocks.values() for d, x in leaf.items()]
    return frozenset(d for d, x in blocks if x.is_deleted() and d not in graph.lost)


def _carry_out(
    batch: Batch,
    held: Mapping[Unit, ElasticModelUnit],
    transfers: Mapping[int, Transfer],
    restore: Callable[[Batch], Sequence[ElasticModelUnit]] | None,
) -> list[ElasticModelUnit]:
    if batch.moves:
        return _transfer(batch, held, transfers[batch.operations[0]])
    if batch.kind in (OperationKind.PARK, OperationKind.UNPARK):
        return [
            dataclasses.replace(unit_in_memory(held[old], parked=new.parked), unit=new)
            for old, new in zip(batch.consumed, batch.targets, strict=True)
        ]
    if batch.kind is OperationKind.RESTORE:
        assert restore is not None, "the graph restores units, but nothing was given to read them"
        return list(restore(batch))
    return []  # DESTROY gives up references; REFRESH is the weight edge's


def _transfer(
    batch: Batch, held: Mapping[Unit, ElasticModelUnit], transfer: Transfer
) -> list[ElasticModelUnit]:
    sources = [held[unit] for unit in batch.sources if unit in held]
    names = [tiling.name for tiling in transfer.schedule.targets]
    blocks = [{d: x for u in sources for d, x in u.blocks[name].items()} for name in names]
    version = sources[0].version
    moved = transfer.run_blocks(blocks)
    return [
        ElasticModelUnit(
            unit=unit,
            blocks={
                name: {d: leaf[d] for d in unit.devices if d in leaf}
                for name, leaf in zip(names, moved, strict=True)
            },
            version=version,
        )
        for unit in batch.targets
    ]


def unit_in_memory(old: ElasticModelUnit, *, parked: bool) -> ElasticModelUnit:
    """A unit with those of its blocks that are left in host memory, or in that of the devices."""

    def move(block: jax.Array) -> jax.Array:
        there = block.is_deleted() or is_parked(block.sharding) == parked
        return block if there else block_in_memory(block, parked=parked)

    blocks = {leaf: {d: move(x) for d, x in of.items()} for leaf, of in old.blocks.items()}
    unit = dataclasses.replace(old.unit, parked=parked)
    return ElasticModelUnit(unit=unit, blocks=blocks, version=old.version)


def _is_ready(unit: ElasticModelUnit) -> bool:
    """Whether all blocks of a unit were made, and are there."""
    if not unit.is_intact:
        return False
    try:
        jax.block_until_ready([list(leaf.values()) for leaf in unit.blocks.values()])
    except RuntimeError:  # what jax raises for an array whose program failed
        return False
    return True


class _Timer:
    """Waits in other threads for what was dispatched, and bounds how much is in flight."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._pool = ThreadPoolExecutor(max_workers=MAX_IN_FLIGHT)
        self._waiting: deque[Future[float]] = deque()
        self._records: list[tuple[Batch, float, int, Future[float]]] = []
        self._makers: dict[Unit, Future[float]] = {}

    def add(
        self, batch: Batch, start_s: float, made: Sequence[ElasticModelUnit], moved: int
    ) -> None:
        if len(self._waiting) >= MAX_IN_FLIGHT:
            self._waiting.popleft().result()
        end = self._pool.submit(_wait, [u.blocks for u in made])
        self._waiting.append(end)
        self._records.append((batch, start_s, moved, end))
        self._makers |= {u.unit: end for u in made}

    def let_go(self, units: Sequence[Unit]) -> None:
        """Makes sure that nobody here keeps the memory of units that are about to be given up."""
        for end in {self._makers.pop(u) for u in units if u in self._makers}:
            end.result()

    def finish(self) -> tuple[Span, ...]:
        spans = tuple(
            Span(
                name=batch.name,
                kind="transition",
                start_s=start_s,
                end_s=max(end.result(), start_s),
                devices=tuple(
                    str(d)
                    for d in sorted(
                        {d for u in (*batch.sources, *batch.targets) for d in u.devices}
                    )
                ),
                step=self._step,
                bytes=moved,
            )
            for batch, start_s, moved, end in self._records
        )
        self._pool.shutdown()
        return spans

    def abandon(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._records.clear()


def _wait(blocks: list[object]) -> float:
    """When the blocks were there; they are let go of."""
    try:
        jax.block_until_ready(blocks)
    finally:
        blocks.clear()
    return time.time()
