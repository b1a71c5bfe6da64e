"""The paper's way of a model-stage: Split, Destroy, Extend, Merge through T_sub.

Source: Nereus, arXiv 2609.34645, on Elastic Model Units. Departure from it: degrees need not be
powers of two; T_sub has the greatest common divisors of the degrees.
"""

import dataclasses

from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.transition import OperationKind, Way
from nereus_jax.planning.transition_draft import Draft, DraftBuilder, Family
from nereus_jax.planning.transition_ways import Change, copy_units
from nereus_jax.planning.unit_bytes import Cut, Ints, held_bytes
from nereus_jax.planning.unit_layouts import Degrees, common_degrees, same_rows, split_rows


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
    found: tuple[int, ...]
    useful: tuple[int, ...]

    @property
    def lacking(self) -> list[int]:
        return [j for j, k in enumerate(self.found) if k < 0]


def composed(change: Change) -> Draft:
    """Split, Destroy, Extend, Merge; needs a copy that is intact."""
    build, old, new = change.start()
    pieces = _pieces(change)
    number_of = _split(change, build, pieces, old)
    taken = [number_of[k] for k in pieces.found if k >= 0]
    lacking = pieces.lacking
    merged = pieces.sub == change.new.degrees
    if merged:
        copies = [new[change.wanted[j]] for j in lacking]
    else:
        copies = list(build.add(_family(change, pieces.sub, pieces.want[lacking])))
    sources = [number_of[k] for k in pieces.useful] or [old[k] for k in change.kept_old]
    copy_units(build, sources, copies)
    build.destroy(number_of[k] for k in pieces.useful if number_of[k] not in set(taken))
    part = {j: number_of[k] for j, k in enumerate(pieces.found) if k >= 0}
    part |= dict(zip(lacking, copies, strict=True))
    final = change.final(old, new)
    if merged:
        named = {new[change.wanted[j]]: unit for j, unit in part.items()}
        final = [named.get(u, u) for u in final]
    elif part:
        each = len(part) // len(change.wanted)
        consumes = [(j // each, part[j]) for j in range(len(part))]
        produces = list(enumerate(new[i] for i in change.wanted))
        build.move(OperationKind.MERGE, [], consumes, produces)
    tp, pp = pieces.sub
    return build.draft(Way.COMPOSED, old, final, f"through units of pp={pp}, tp={tp}")


def _pieces(change: Change) -> _Pieces:
    sub = common_degrees(change.old.degrees, change.new.degrees)
    usable, wanted = list(change.usable), list(change.wanted)
    have = split_rows(change.old.rows[usable], change.old.degrees, sub)
    want = split_rows(change.new.rows[wanted], change.new.degrees, sub)
    found = same_rows(have, want, change.ground.num_devices).tolist()
    useful = sorted({k for k in found if k >= 0})
    lacking = len([k for k in found if k < 0])
    if lacking and not useful and not change.kept_old:
        each = len(have) // len(usable)
        useful = [n * each for n in range(min(len(usable), lacking))]
    return _Pieces(sub=sub, have=have, want=want, found=tuple(found), useful=tuple(useful))


def _split(change: Change, build: DraftBuilder, pieces: _Pieces, old: range) -> dict[int, int]:
    """Destroys old units that are of no use, and splits the others; numbers of useful pieces."""
    usable = change.usable
    each = len(pieces.have) // len(usable) if usable else 1
    needed = sorted({k // each for k in pieces.useful})
    keep = {usable[n] for n in needed}
    build.destroy(old[i] for i in change.changed if i not in keep)
    if pieces.sub == change.old.degrees:
        return {k: old[usable[k]] for k in pieces.useful}
    split = [n * each + k for n in needed for k in range(each)]
    numbers = build.add(_family(change, pieces.sub, pieces.have[split]))
    number_of = dict(zip(split, numbers, strict=True))
    consumes = [(o, old[usable[n]]) for o, n in enumerate(needed)]
    produces = [(o // each, number) for o, number in enumerate(numbers)]
    build.move(OperationKind.SPLIT, [], consumes, produces)
    useful = set(pieces.useful)
    build.destroy(number for k, number in number_of.items() if k not in useful)
    return number_of


def _family(change: Change, sub: Degrees, rows: Ints) -> Family:
    tp, pp = sub
    cut = Cut.of(ParallelLayout(1, pp, tp), change.num_kv_heads)
    held = held_bytes(change.classes, cut, 1)
    return Family(rows=rows, tp=tp, pp=pp, cut=cut, device_bytes=held)
