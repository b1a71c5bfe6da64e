"""The ways from a model-stage's old units to its new ones: composed, direct, lean, parked, ...

Every way keeps this: as long as a model-stage has state of its own, an intact copy of it exists at
every moment, in every order that the units allow. A copy is destroyed at once only if another one
stays until its replacement is there.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own types of `flatnonzero`, `sort` and `argsort` are partly unknown.)

import dataclasses

import numpy as np

from nereus_jax.core.transition import OperationKind, RecoverySource, Way
from nereus_jax.planning.transition_builder import DraftBuilder
from nereus_jax.planning.transition_draft import (
    NO_UNITS,
    NONE,
    Draft,
    Family,
    Ground,
    Some,
)
from nereus_jax.planning.unit_cuts import Ints, LeafClass, MeshShape
from nereus_jax.planning.unit_layouts import (
    Degrees,
    meeting_groups,
    owner,
    same_rows,
    spread,
    whole,
    without,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The units of a model-stage in one of the two plans.

    Attributes:
      rows: [dp, pp * tp] indices of devices.
      tp, pp: their degrees.
      mesh: shape of that of a unit, or of the whole group under ZeRO-1.
      device_bytes: what a unit holds on a device; 0 where its arrays are another model-stage's.
    """

    rows: Ints
    tp: int
    pp: int
    mesh: MeshShape
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
            mesh=self.mesh,
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
      kept: [new units] the old unit that each is, or -1.
      usable: old units that do not stay, and are whole on devices that are alive.
      broken: old units that have lost a device.
      wanted: new units that do not exist yet.
      grouped: units can only be moved together (ZeRO-1).
      parted: no old unit is whole by itself (ZeRO-1 before the change; it may begin or end with
        it).
    """

    ground: Ground
    classes: tuple[LeafClass, ...]
    num_kv_heads: int
    old: Side
    new: Side
    kept: Ints
    usable: Ints
    broken: Ints
    wanted: Ints
    grouped: bool
    parted: bool

    @classmethod
    def of(
        cls,
        ground: Ground,
        classes: tuple[LeafClass, ...],
        num_kv_heads: int,
        old: Side,
        new: Side,
        *,
        grouped: bool,
        parted: bool,
    ) -> "Change":
        """Compares the two sides."""
        none = np.full(len(new.rows), -1, np.int64)
        kept = none
        # Other bytes: it shared another model-stage's arrays, or will share them.
        if old.degrees == new.degrees and old.device_bytes == new.device_bytes:
            kept = same_rows(old.rows, new.rows, ground.num_devices)
        if grouped and (old.rows.shape != new.rows.shape or (old.rows != new.rows).any()):
            kept = none  # the optimizer's tensors are cut by the whole placement
        intact = whole(old.rows, ground.alive)
        leaves = np.ones(len(old.rows), np.bool_)
        leaves[kept[kept >= 0]] = False
        return cls(
            ground=ground,
            classes=classes,
            num_kv_heads=num_kv_heads,
            old=old,
            new=new,
            kept=kept,
            usable=np.flatnonzero(intact & leaves),
            broken=np.flatnonzero(~intact),
            wanted=np.flatnonzero(kept < 0),
            grouped=grouped,
            parted=parted,
        )

    @property
    def changed(self) -> Ints:
        """Old units that do not stay."""
        if not len(self.broken):
            return self.usable
        return np.sort(np.concatenate([self.usable, self.broken]))

    @property
    def kept_old(self) -> Ints:
        """Old units that stay."""
        return self.kept[self.kept >= 0]

    @property
    def is_kept(self) -> bool:
        """Whether nothing changes."""
        return not len(self.usable) and not len(self.broken) and not len(self.wanted)

    @property
    def has_intact(self) -> bool:
        """Whether a copy of the state is whole on devices that are alive."""
        if self.parted:
            return not len(self.broken) and bool(len(self.old.rows))
        return bool(len(self.usable) or len(self.kept_old))

    @property
    def survives(self) -> bool:
        """Whether what is left of all copies together makes up the whole state."""
        if self.parted or not len(self.old.rows):
            return False
        return bool(self.ground.alive[self.old.rows].any(axis=0).all())

    def final(self, old: Ints, new: Ints) -> Ints:
        """Numbers of the units at the end: a kept unit goes by its old number."""
        units = new.copy()
        units[self.kept >= 0] = old[self.kept_old]
        return units

    def start(self) -> tuple[DraftBuilder, Ints, Ints]:
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
    build.destroy(old[change.changed])
    build.refresh(new[change.wanted])
    final = change.final(old, new)
    return build.draft(Way.REFRESHED, old, final, "its weight edge fills it in the next step")


def released(change: Change) -> Draft:
    """All units go."""
    build, old, _ = change.start()
    build.destroy(old)
    return build.draft(Way.RELEASED, old, NO_UNITS, "the new plan has no such model-stage")


def restored(change: Change, source: RecoverySource) -> Draft:
    """New units from outside, then copies of them."""
    build, old, new = change.start()
    build.destroy(old[change.changed])
    if change.grouped:
        build.restore(Some.together(new), source)
    else:
        wanted = new[change.wanted]
        build.restore(Some.each(wanted[:1]), source)
        copy_units(build, wanted[:1], wanted[1:])
    final = change.final(old, new)
    return build.draft(Way.RESTORED, old, final, f"no copy is intact: restored from {source}")


def regrouped(change: Change) -> Draft:
    """One Reshard of all units at once: ZeRO-1, or copies that are whole only together."""
    build, old, new = change.start()
    build.move(OperationKind.RESHARD, NONE, Some.together(old), Some.together(new))
    return build.draft(Way.DIRECT, old, new, "its units can only be read together")


def direct(change: Change) -> Draft:
    """Units that share devices are resharded together; others are copied."""
    build, old, new = change.start()
    build.destroy(old[change.broken])
    _reshard(change, build, change.usable, old, new)
    final = change.final(old, new)
    return build.draft(Way.DIRECT, old, final, "moves only what the target devices lack")


def lean(change: Change) -> Draft:
    """Only one old copy is kept, and the memory of the others is free before anything moves."""
    build, old, new = change.start()
    source = NO_UNITS
    if not len(change.kept_old):
        new_of = owner(change.new.rows, change.ground.num_devices)
        shared = (new_of[change.old.rows[change.usable]] >= 0).sum(axis=1)
        source = change.usable[shared.argmin()][None]
    build.destroy(old[without(change.changed, source)])
    _reshard(change, build, source, old, new)
    final = change.final(old, new)
    return build.draft(Way.LEAN, old, final, "frees all copies but one before any moves")


def parked(change: Change) -> Draft:
    """One copy (under ZeRO-1 all units) waits in host memory until devices have room."""
    build, old, new = change.start()
    family = change.old.family(parked=True)
    if change.grouped:
        waiting = build.add(family)
        build.park(Some.together(old), Some.together(waiting))
        build.unpark(Some.together(waiting), Some.together(new), after_all=False)
    else:
        copy = change.usable[:1]
        build.destroy(old[without(change.changed, copy)])
        waiting = build.add(dataclasses.replace(family, rows=family.rows[copy]))
        build.park(Some.each(old[copy]), Some.each(waiting))
        _unpark_one(build, waiting, new[change.wanted])
    final = change.final(old, new)
    return build.draft(Way.PARKED, old, final, "device memory has no room for two copies")


def evicted(change: Change) -> Draft:
    """Units that do not change make room for others, and come back at the end."""
    build, old, new = change.start()
    waiting = build.add(change.old.family(parked=True))
    some = Some.together if change.grouped else Some.each
    build.park(some(old), some(waiting))
    build.unpark(some(waiting), some(new), after_all=True)
    return build.draft(Way.PARKED, old, new, "makes room for other model-stages meanwhile")


def unparked(change: Change) -> Draft:
    """The old units are in host memory already."""
    build = DraftBuilder(change.ground, change.classes)
    old, new = build.add(change.old.family(parked=True)), build.add(change.new.family())
    if change.grouped:
        build.unpark(Some.together(old), Some.together(new), after_all=False)
    else:
        build.destroy(old[1:])
        _unpark_one(build, old[:1], new)
    return build.draft(Way.PARKED, old, new, "it was in host memory")


def put_away(change: Change) -> Draft:
    """The new plan wants the units in host memory, at their old places."""
    build = DraftBuilder(change.ground, change.classes)
    old, new = build.add(change.old.family()), build.add(change.old.family(parked=True))
    build.hold(old)
    some = Some.together if change.grouped else Some.each
    build.park(some(old), some(new))
    return build.draft(Way.PARKED, old, new, "the new plan keeps it in host memory")


def stays_parked(change: Change) -> Draft:
    """In host memory in both plans."""
    build = DraftBuilder(change.ground, change.classes)
    old = build.add(change.old.family(parked=True))
    return build.draft(Way.KEPT, old, old, "it stays in host memory")


def copy_units(build: DraftBuilder, sources: Ints, targets: Ints) -> None:
    """Copies of units, passed on over a tree: Extend, or Reshard from another layout.

    Args:
      build: where they go.
      sources: units of one layout that have the state.
      targets: units of one layout that want it.
    """
    if not len(targets):
        return
    givers, takers = spread(build.nodes(sources), build.nodes(targets))
    units = np.concatenate([sources, targets])
    first, last = build.family(int(sources[0])), build.family(int(targets[0]))
    far = np.zeros(len(takers), np.bool_)
    if (first.tp, first.pp) != (last.tp, last.pp):
        far = givers < len(sources)
    for kind, chosen in ((OperationKind.RESHARD, far), (OperationKind.EXTEND, ~far)):
        reads, produces = units[givers[chosen]], units[takers[chosen]]
        build.move(kind, Some.each(reads), NONE, Some.each(produces))


def _reshard(change: Change, build: DraftBuilder, olds: Ints, old: Ints, new: Ints) -> None:
    """From some old units to all wanted ones: groups that share devices, then copies.

    Old units that share no device with a new one are destroyed at once, unless copies are made of
    them because there is nothing else to copy.
    """
    wanted = change.wanted
    old_group, new_group = meeting_groups(
        change.old.rows[olds], change.new.rows[wanted], change.ground.num_devices
    )
    met: list[Ints] = []
    for group in (old_group, new_group):
        order = np.argsort(group, kind="stable")
        met.append(order[group[order] >= 0])
    apart, copies = old[olds[old_group < 0]], new[wanted[new_group < 0]]
    sources = old[change.kept_old]
    if not len(sources):
        sources = new[wanted[np.sort(met[1])]]
    read_apart = bool(len(copies)) and not len(sources)
    if not read_apart:
        build.destroy(apart)
    consumes = Some(operation=old_group[met[0]], unit=old[olds[met[0]]])
    produces = Some(operation=new_group[met[1]], unit=new[wanted[met[1]]])
    build.move(OperationKind.RESHARD, NONE, consumes, produces)
    copy_units(build, apart if read_apart else sources, copies)
    if read_apart:
        build.destroy(apart)


def _unpark_one(build: DraftBuilder, waiting: Ints, targets: Ints) -> None:
    """A parked unit comes back as the first of some units; the others are copies of that."""
    build.unpark(Some.each(waiting), Some.each(targets[:1]), after_all=False)
    copy_units(build, targets[:1], targets[1:])
