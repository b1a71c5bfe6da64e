"""The paper's way of a model-stage: Split, Destroy, Extend, Merge through T_sub.

Source: Nereus, arXiv 2609.34645, on Elastic Model Units. Departure from it: degrees need not be
powers of two; T_sub has the greatest common divisors of the degrees.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own type of `flatnonzero` is partly unknown.)

import dataclasses

import numpy as np

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.transition import OperationKind, Way
from nereus_jax.planning.transition_builder import DraftBuilder
from nereus_jax.planning.transition_draft import NONE, Draft, Family, Some
from nereus_jax.planning.transition_ways import Change, copy_units
from nereus_jax.planning.unit_cuts import Ints, held_bytes
from nereus_jax.planning.unit_layouts import (
    Degrees,
    common_degrees,
    distinct,
    same_rows,
    split_rows,
    without,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Pieces:
    """The sub-units of a change.

    Attributes:
      sub: (tp, pp) of T_sub.
      have: [pieces, sub pp * sub tp] what the usable old units split into.
      want: what the wanted new units split into.
      found: for each wanted piece the piece that it is, or -1.
      useful: pieces that are kept after Split: those found, or those copied from.
    """

    sub: Degrees
    have: Ints
    want: Ints
    found: Ints
    useful: Ints


def composed(change: Change) -> Draft:
    """Split, Destroy, Extend, Merge; needs a copy that is intact."""
    build, old, new = change.start()
    pieces = _pieces(change)
    number = _split(change, build, pieces, old)
    lacking = np.flatnonzero(pieces.found < 0)
    merged = pieces.sub == change.new.degrees
    if merged:
        copies = new[change.wanted[lacking]]
    else:
        copies = build.add(_family(change, pieces.sub, pieces.want[lacking]))
    useful = number[pieces.useful]
    copy_units(build, useful if len(useful) else old[change.kept_old], copies)
    taken = pieces.found[pieces.found >= 0]
    build.destroy(number[without(pieces.useful, taken)])
    part = np.zeros(len(pieces.found), np.int64)
    part[pieces.found >= 0], part[lacking] = number[taken], copies
    final = change.final(old, new)
    if merged:
        final[change.wanted] = part
    else:
        consumes = Some.shared(part, len(change.wanted))
        build.move(OperationKind.MERGE, NONE, consumes, Some.each(new[change.wanted]))
    tp, pp = pieces.sub
    return build.draft(Way.COMPOSED, old, final, f"through units of pp={pp}, tp={tp}")


def _pieces(change: Change) -> _Pieces:
    sub = common_degrees(change.old.degrees, change.new.degrees)
    have = split_rows(change.old.rows[change.usable], change.old.degrees, sub)
    want = split_rows(change.new.rows[change.wanted], change.new.degrees, sub)
    found = same_rows(have, want, change.ground.num_devices)
    useful = distinct(found[found >= 0])
    lacking = int((found < 0).sum())
    if lacking and not len(useful) and not len(change.kept_old):
        each = len(have) // len(change.usable)
        useful = np.arange(min(len(change.usable), lacking)) * each
    return _Pieces(sub=sub, have=have, want=want, found=found, useful=useful)


def _split(change: Change, build: DraftBuilder, pieces: _Pieces, old: Ints) -> Ints:
    """Destroys old units that are of no use, and splits the others.

    Returns:
      For each piece its number; -1 for those of a unit that was destroyed.
    """
    usable = change.usable
    number = np.full(len(pieces.have), -1, np.int64)
    each = len(pieces.have) // max(len(usable), 1)
    needed = distinct(pieces.useful // max(each, 1))
    build.destroy(old[without(change.changed, usable[needed])])
    if pieces.sub == change.old.degrees:
        number[:] = old[usable]
        return number
    split = (needed[:, None] * each + np.arange(each)).ravel()
    number[split] = build.add(_family(change, pieces.sub, pieces.have[split]))
    produces = Some.shared(number[split], len(needed))
    build.move(OperationKind.SPLIT, NONE, Some.each(old[usable[needed]]), produces)
    build.destroy(number[without(split, pieces.useful)])
    return number


def _family(change: Change, sub: Degrees, rows: Ints) -> Family:
    tp, pp = sub
    mesh = ParallelLayout(1, pp, tp).mesh_shape(change.num_kv_heads)
    held = held_bytes(change.classes, mesh, 1)
    return Family(rows=rows, tp=tp, pp=pp, mesh=mesh, device_bytes=held)
