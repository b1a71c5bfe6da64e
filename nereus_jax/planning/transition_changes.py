"""What becomes of each model-stage between two plans, and what several transitions have in common.

Who weighs targets against each other plans many transitions from one plan. The targets have most
model-stages at the same places, and a job's leaves are always the same.
"""
# pyright: reportUnknownMemberType=false
# (numpy's own type of `tobytes` is partly unknown.)

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Plan
from nereus_jax.core.roles import ModelStage
from nereus_jax.planning.transition_draft import Ground
from nereus_jax.planning.transition_inputs import StageState
from nereus_jax.planning.transition_ladder import Ladder
from nereus_jax.planning.transition_ways import Change, Side
from nereus_jax.planning.unit_cuts import Ints, LeafClass, MeshShape, held_bytes, leaf_classes

Specs = tuple[EmuSpec, EmuSpec | None]
"""Parameters and optimizer."""
MOST_KNOWN = 512
"""Entries of a table, as many as are kept: a job of a month does not grow by them."""


@dataclasses.dataclass(kw_only=True, eq=False)
class TransitionTables:
    """What was worked out for transitions of one job; nothing of it changes what comes of one.

    Attributes:
      classes: how meshes cut leaves. Specs go by identity, since to compare them takes as long as
        to look at them; those looked up are kept, so that none takes another one's place.
      ladders: of model-stages that change alike, as they are at first.
      ground: that they stand on; others are forgotten.
    """

    classes: dict[tuple[object, ...], tuple[Specs, tuple[LeafClass, ...]]] = dataclasses.field(
        default_factory=dict[tuple[object, ...], tuple[Specs, tuple[LeafClass, ...]]]
    )
    ladders: dict[tuple[object, ...], tuple[Specs, Ladder]] = dataclasses.field(
        default_factory=dict[tuple[object, ...], tuple[Specs, Ladder]]
    )
    ground: Ground | None = None

    def stand_on(self, ground: Ground) -> Ground:
        """The same ground as before, where nothing in it has changed."""
        if len(self.classes) > MOST_KNOWN:
            self.classes.clear()
        if self.ground is None or not _same(self.ground, ground):
            self.ground = ground
            self.ladders.clear()
        elif len(self.ladders) > MOST_KNOWN:
            self.ladders.clear()
        return self.ground


def _same(a: Ground, b: Ground) -> bool:
    return (
        a.budget is b.budget
        and (a.hardware is b.hardware or a.hardware == b.hardware)
        and a.node_names == b.node_names
        and a.devices == b.devices
        and bool((a.node == b.node).all())
        and bool((a.alive == b.alive).all())
        and bool((a.capacity == b.capacity).all())
    )


class Changes:
    """Makes the ladder of each model-stage of a transition.

    Args:
      states: of the model-stages.
      plans: source and target.
      rows: for each plan and model-stage [dp, pp * tp] indices of the devices.
      ground: what all model-stages share.
      tables: what is known already, and is added to; None: nothing.
    """

    def __init__(
        self,
        *,
        states: Mapping[ModelStage, StageState],
        plans: tuple[Plan, Plan],
        rows: Sequence[Mapping[ModelStage, Ints]],
        ground: Ground,
        tables: TransitionTables | None = None,
    ) -> None:
        self._states, self._plans, self._rows = states, plans, rows
        self._tables = tables or TransitionTables()
        self._ground = self._tables.stand_on(ground)

    def ladder(self, model_stage: ModelStage) -> Ladder:
        """The ways of a model-stage, none of them taken yet."""
        state, target = self._states[model_stage], self._plans[1]
        refreshed = state.refreshed_by in target.placements
        present = [model_stage in plan for plan in self._plans]
        shares = [self._shares(model_stage, plan) for plan in self._plans]
        ends: list[object] = [refreshed, *shares]
        for here, plan, rows in zip(present, self._plans, self._rows, strict=True):
            if here:
                ends += plan[model_stage].layout, rows[model_stage].tobytes()
            else:
                ends.append(None)
        specs: Specs = state.parameters, state.optimizer
        given = (
            state.num_kv_heads,
            state.zero1_ends,
            state.recovery,
            state.parked_before,
            state.parked_after,
        )
        key = (model_stage, *map(id, specs), given, *ends)
        if key not in self._tables.ladders:
            change = self._change(model_stage, state, shares)
            ladder = Ladder(model_stage, change, state, wanted=present[1], refreshed=refreshed)
            self._tables.ladders[key] = specs, ladder
        return self._tables.ladders[key][1].copy()

    def _change(self, model_stage: ModelStage, state: StageState, shares: Sequence[bool]) -> Change:
        """What becomes of the units of a model-stage."""
        plans = self._plans
        layouts = [p[model_stage].layout if model_stage in p else None for p in plans]
        present = [x for x in layouts if x is not None]
        split = [
            zero1 and layout is not None and layout.dp > 1 and state.optimizer is not None
            for zero1, layout in zip(state.zero1_ends, layouts, strict=True)
        ]
        grouped = any(split)
        meshes = [
            ParallelLayout(x.dp if grouped else 1, x.pp, x.tp).mesh_shape(state.num_kv_heads)
            for x in (layouts[0] or present[0], layouts[1] or present[-1])
        ]
        classes = self._classes(state, meshes, grouped)
        sides: list[Side] = []
        for end, plan in enumerate(plans):
            layout = layouts[end] or present[0]
            rows = np.zeros((0, layout.pp * layout.tp), np.int64)
            if model_stage in plan:
                rows = self._rows[end][model_stage]
            held = 0 if shares[end] else held_bytes(classes, meshes[end], end)
            side = Side(rows=rows, tp=layout.tp, pp=layout.pp, mesh=meshes[end], device_bytes=held)
            sides.append(side)
        return Change.of(
            self._ground,
            classes,
            state.num_kv_heads,
            sides[0],
            sides[1],
            grouped=grouped,
            parted=split[0],
        )

    def _classes(
        self, state: StageState, meshes: Sequence[MeshShape], grouped: bool
    ) -> tuple[LeafClass, ...]:
        specs: Specs = state.parameters, state.optimizer
        # What is not split over dp is cut by names of axes alone, whatever their sizes.
        cuts = [
            mesh if grouped and zero1 else None
            for mesh, zero1 in zip(meshes, state.zero1_ends, strict=True)
        ]
        key = (*map(id, specs), *cuts)
        if key not in self._tables.classes:
            ends: list[list[EmuSpec]] = []
            for cut in cuts:
                own = [state.parameters]
                if state.optimizer is not None:
                    own.append(state.optimizer.with_zero(cut) if cut else state.optimizer)
                ends.append(own)
            self._tables.classes[key] = specs, leaf_classes(*ends)
        return self._tables.classes[key][1]

    def _shares(self, model_stage: ModelStage, plan: Plan) -> bool:
        """Whether a plan lets a model-stage use the very arrays of the one that refreshes it."""
        origin = self._states[model_stage].refreshed_by
        if origin is None or model_stage not in plan or origin not in plan:
            return False
        mine, its = self._states[model_stage].parameters, self._states[origin].parameters
        return plan[model_stage] == plan[origin] and (mine is its or mine == its)
