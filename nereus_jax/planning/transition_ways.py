"""The ways from a model-stage's old units to its new ones: composed, direct, lean, parked, ...

Every way keeps this: as long as a model-stage has state of its own, an intact copy of it exists at
every moment, in every order that the units allow. A copy is destroyed at once only if another one
stays until its replacement is there.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from nereus_jax.core.transition import OperationKind, RecoverySource, Way
from nereus_jax.planning.transition_draft import Draft, DraftBuilder, Family, Ground
from nereus_jax.planning.unit_bytes import Cut, Ints, LeafClass
from nereus_jax.planning.unit_layouts import (
    Degrees,
    meeting_groups,
    owner,
    same_rows,
    spread,
    whole,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The units of a model-stage in one of the two plans.

    Attributes:
      rows: [dp, pp * tp] indices of devices.
      tp, pp: their degrees.
      cut: the mesh of a unit, or of the whole group under ZeRO-1.
      device_bytes: what a unit holds on a device; 0 where its arrays are another model-stage's.
    """

    rows: Ints
    tp: int
    pp: int
    cut: Cut
    device_bytes: int

    @property
    def degrees(self) -> Degrees:
        return self.tp, self.pp

    def family(self, parked: bool = False) -> Family:
        """All units, on devices or parked."""
        return Family(
            rows=self.rows,
            tp=self.tp,
            pp=self.pp,
            cut=self.cut,
            device_bytes=0 if parked else self.device_bytes,
            parked=parked,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """What becomes of the units of one model-stage.

    Attributes:
      ground: what all model-stages share.
      classes: its leaves.
      num_kv_heads: of its model.
      old: where it is.
      new: where it is wanted.
      kept: for each new unit the old one that it is, or -1.
      usable: old units that do not stay, and are whole on devices that are alive.
      broken: old units that have lost a device.
      wanted: new units that do not exist yet.
      grouped: units can only be moved together (ZeRO-1).
    """

    ground: Ground
    classes: tuple[LeafClass, ...]
    num_kv_heads: int
    old: Side
    new: Side
    kept: tuple[int, ...]
    usable: tuple[int, ...]
    broken: tuple[int, ...]
    wanted: tuple[int, ...]
    grouped: bool

    @classmethod
    def of(
        cls,
        ground: Ground,
        classes: Sequence[LeafClass],
        num_kv_heads: int,
        old: Side,
        new: Side,
        grouped: bool,
    ) -> "Change":
        """Compares the two sides."""
        kept = [-1] * len(new.rows)
        if old.degrees == new.degrees:
            kept = same_rows(old.rows, new.rows, ground.num_devices).tolist()
        if old.device_bytes != new.device_bytes:  # it shared another's arrays, or will share them
            kept = [-1] * len(new.rows)
        if grouped and (len(old.rows) != len(new.rows) or kept != list(range(len(kept)))):
            kept = [-1] * len(new.rows)  # the optimizer's tensors are cut by the whole placement
        stays = set(kept)
        intact = whole(old.rows, ground.alive).tolist()
        return cls(
            ground=ground,
            classes=tuple(classes),
            num_kv_heads=num_kv_heads,
            old=old,
            new=new,
            kept=tuple(kept),
            usable=tuple(i for i, ok in enumerate(intact) if ok and i not in stays),
            broken=tuple(i for i, ok in enumerate(intact) if not ok),
            wanted=tuple(i for i, k in enumerate(kept) if k < 0),
            grouped=grouped,
        )

    @property
    def changed(self) -> tuple[int, ...]:
        """Old units that do not stay."""
        return tuple(sorted((*self.usable, *self.broken)))

    @property
    def kept_old(self) -> tuple[int, ...]:
        """Old units that stay."""
        return tuple(k for k in self.kept if k >= 0)

    @property
    def is_kept(self) -> bool:
        """Whether nothing changes."""
        return not self.usable and not self.broken and not self.wanted

    @property
    def has_intact(self) -> bool:
        """Whether a copy of the state is whole on devices that are alive."""
        if self.grouped:
            return not self.broken and bool(len(self.old.rows))
        return bool(self.usable or self.kept_old)

    @property
    def survives(self) -> bool:
        """Whether what is left of all copies together makes up the whole state."""
        if self.grouped or not len(self.old.rows):
            return False
        return bool(self.ground.alive[self.old.rows].any(axis=0).all())

    def final(self, old: Sequence[int], new: Sequence[int]) -> list[int]:
        """Numbers of the units at the end: a kept unit goes by its old number."""
        return [old[k] if k >= 0 else new[i] for i, k in enumerate(self.kept)]

    def start(self) -> tuple[DraftBuilder, range, range]:
        """A builder that holds the old units, and the numbers of the old and the new ones."""
        build = DraftBuilder(self.ground, self.classes)
        old, new = build.add(self.old.family()), build.add(self.new.family())
        build.hold(old)
        return build, old, new


def kept(change: Change) -> Draft:
    """Nothing to do."""
    build, old, _ = change.start()
    return build.draft(Way.KEPT, old, old, "its units are the same in both plans")


def refreshed(change: Change) -> Draft:
    """Old units go, new ones are filled by the next step's weight edge."""
    build, old, new = change.start()
    build.destroy(old[i] for i in change.changed)
    build.refresh(new[i] for i in change.wanted)
    final = change.final(old, new)
    return build.draft(Way.REFRESHED, old, final, "its weight edge fills it in the next step")


def released(change: Change) -> Draft:
    """All units go."""
    build, old, _ = change.start()
    build.destroy(old)
    return build.draft(Way.RELEASED, old, (), "the new plan has no such model-stage")


def restored(change: Change, source: RecoverySource) -> Draft:
    """New units from outside, then copies of them."""
    build, old, new = change.start()
    build.destroy(old[i] for i in change.changed)
    if change.grouped:
        build.restore([(0, u) for u in new], source)
    else:
        build.restore([(0, new[change.wanted[0]])], source)
        copy_units(build, [new[change.wanted[0]]], [new[i] for i in change.wanted[1:]])
    final = change.final(old, new)
    return build.draft(Way.RESTORED, old, final, f"no copy is intact: restored from {source}")


def regrouped(change: Change) -> Draft:
    """One Reshard of all units at once: ZeRO-1, or copies that are whole only together."""
    build, old, new = change.start()
    build.move(OperationKind.RESHARD, [], [(0, u) for u in old], [(0, u) for u in new])
    return build.draft(Way.DIRECT, old, new, "its units can only be read together")


def direct(change: Change) -> Draft:
    """Units that share devices are resharded together; others are copied."""
    build, old, new = change.start()
    build.destroy(old[i] for i in change.broken)
    _reshard(change, build, change.usable, old, new)
    final = change.final(old, new)
    return build.draft(Way.DIRECT, old, final, "moves only what the target devices lack")


def lean(change: Change) -> Draft:
    """Only one old copy is kept, and the memory of the others is free before anything moves."""
    build, old, new = change.start()
    source: list[int] = []
    if not change.kept_old:
        new_of = owner(change.new.rows, change.ground.num_devices)
        shared = (new_of[change.old.rows] >= 0).sum(axis=1).tolist()
        source = [min(change.usable, key=lambda i: shared[i])]
    build.destroy(old[i] for i in change.changed if i not in source)
    _reshard(change, build, source, old, new)
    final = change.final(old, new)
    return build.draft(Way.LEAN, old, final, "frees all copies but one before any moves")


def parked(change: Change) -> Draft:
    """One copy (under ZeRO-1 all units) waits in host memory until devices have room."""
    build, old, new = change.start()
    if change.grouped:
        waiting = build.add(change.old.family(parked=True))
        build.park([(0, u) for u in old], [(0, u) for u in waiting])
        build.unpark([], [(0, u) for u in waiting], [(0, u) for u in new], after_all=False)
    else:
        copy = change.usable[0]
        build.destroy(old[i] for i in change.changed if i != copy)
        parked_family = change.old.family(parked=True)
        one = dataclasses.replace(parked_family, rows=parked_family.rows[copy : copy + 1])
        waiting = build.add(one)
        build.park([(0, old[copy])], [(0, waiting[0])])
        _unpark_one(build, waiting[0], [new[i] for i in change.wanted])
    final = change.final(old, new)
    return build.draft(Way.PARKED, old, final, "device memory has no room for two copies")


def evicted(change: Change) -> Draft:
    """Units that do not change make room for others, and come back at the end."""
    build, old, new = change.start()
    waiting = build.add(change.old.family(parked=True))
    number = [0 if change.grouped else i for i in range(len(old))]
    build.park(_pairs(number, old), _pairs(number, waiting))
    build.unpark([], _pairs(number, waiting), _pairs(number, new), after_all=True)
    return build.draft(Way.PARKED, old, new, "makes room for other model-stages meanwhile")


def unparked(change: Change) -> Draft:
    """The old units are in host memory already."""
    build = DraftBuilder(change.ground, change.classes)
    old, new = build.add(change.old.family(parked=True)), build.add(change.new.family())
    if change.grouped:
        build.unpark([], [(0, u) for u in old], [(0, u) for u in new], after_all=False)
    else:
        build.destroy(old[1:])
        _unpark_one(build, old[0], list(new))
    return build.draft(Way.PARKED, old, new, "it was in host memory")


def put_away(change: Change) -> Draft:
    """The new plan wants the units in host memory, at their old places."""
    build = DraftBuilder(change.ground, change.classes)
    old, new = build.add(change.old.family()), build.add(change.old.family(parked=True))
    build.hold(old)
    number = [0 if change.grouped else i for i in range(len(old))]
    build.park(_pairs(number, old), _pairs(number, new))
    return build.draft(Way.PARKED, old, new, "the new plan keeps it in host memory")


def stays_parked(change: Change) -> Draft:
    """In host memory in both plans."""
    build = DraftBuilder(change.ground, change.classes)
    old = build.add(change.old.family(parked=True))
    return build.draft(Way.KEPT, old, old, "it stays in host memory")


def copy_units(build: DraftBuilder, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copies of units, passed on over a tree: Extend, or Reshard from another layout."""
    if not targets:
        return
    place = {unit: build.node_of(unit) for unit in (*sources, *targets)}
    pairs = spread(sources, targets, place)
    layout = build.degrees(targets[0])
    far = [(s, t) for s, t in pairs if build.degrees(s) != layout]
    near = [(s, t) for s, t in pairs if build.degrees(s) == layout]
    for kind, chosen in ((OperationKind.RESHARD, far), (OperationKind.EXTEND, near)):
        reads = [(n, s) for n, (s, _) in enumerate(chosen)]
        build.move(kind, reads, [], [(n, t) for n, (_, t) in enumerate(chosen)])


def _reshard(
    change: Change, build: DraftBuilder, olds: Sequence[int], old: range, new: range
) -> None:
    """From some old units to all wanted ones: groups that share devices, then copies.

    Old units that share no device with a new one are destroyed at once, unless copies are made of
    them because there is nothing else to copy.
    """
    number, wanted = change.ground.num_devices, change.wanted
    old_rows, new_rows = change.old.rows[list(olds)], change.new.rows[list(wanted)]
    groups = meeting_groups(
        owner(old_rows, number), owner(new_rows, number), len(old_rows), len(new_rows)
    )
    met_old = {i for ours, _ in groups for i in ours}
    met_new = {j for _, theirs in groups for j in theirs}
    apart = [old[i] for n, i in enumerate(olds) if n not in met_old]
    copies = [new[j] for n, j in enumerate(wanted) if n not in met_new]
    sources = [old[k] for k in change.kept_old]
    sources = sources or [new[wanted[j]] for j in sorted(met_new)]
    read_apart = bool(copies) and not sources
    if not read_apart:
        build.destroy(apart)
    consumes = [(n, old[olds[i]]) for n, (ours, _) in enumerate(groups) for i in ours]
    produces = [(n, new[wanted[j]]) for n, (_, theirs) in enumerate(groups) for j in theirs]
    build.move(OperationKind.RESHARD, [], consumes, produces)
    copy_units(build, sources or apart, copies)
    if read_apart:
        build.destroy(apart)


def _unpark_one(build: DraftBuilder, waiting: int, targets: Sequence[int]) -> None:
    """A parked unit comes back as the first of some units; the others are copies of that."""
    build.unpark([], [(0, waiting)], [(0, targets[0])], after_all=False)
    copy_units(build, targets[:1], targets[1:])


def _pairs(numbers: Iterable[int], units: Iterable[int]) -> list[tuple[int, int]]:
    return list(zip(numbers, units, strict=True))
