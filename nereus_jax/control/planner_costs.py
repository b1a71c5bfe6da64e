"""The planner as a cost function: what a controller uses unless an embedder brings its own."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from nereus_jax.control.costs import Beliefs, Candidate, Candidates, TransitionEstimate
from nereus_jax.control.device_assignment import Held, assign, group_node_size, node_counts, spread
from nereus_jax.control.survival import survives
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.emu_spec import EmuSpec
from nereus_jax.core.errors import InfeasiblePlanError
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.layout import divisors
from nereus_jax.core.plan import Placement, Plan
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.core.transition import LinkBytes, RecoverySource, TransitionGraph
from nereus_jax.planning.calibration import Efficiencies, OperationClass
from nereus_jax.planning.cost_terms import COMPILE_S
from nereus_jax.planning.plan_price import (
    Known,
    PlanPrice,
    plan_bytes,
    price_plan,
    searched_prices,
    stage_class_seconds,
)
from nereus_jax.planning.search_plans import PlannedStep, PlanSearch, find_plans
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.transition_changes import TransitionTables
from nereus_jax.planning.transition_graph import plan_transition
from nereus_jax.planning.transition_inputs import StageState, TransitionBudget, decoder_states
from nereus_jax.planning.workload import Workload

PROGRAMS: Mapping[Stage, int] = {Stage.GENERATE: 2, Stage.SCORE: 1, Stage.TRAIN: 2}
"""Programs of a model-stage that its layout and microbatches shape; the second is its part in
weight edges or in the optimizer."""
APART = 1e-3
"""Candidates differ in their seconds by this share at least."""
UNEVEN_SEARCHES = 2
"""Ways to see a pool whose nodes are not equally full as one of equal nodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moved:
    """What a transition leads from and to.

    Attributes:
      states: of the model-stages.
      source, target: the plans between steps.
      later_s: what the first step after it needs on top.
      later_bytes: what moves then.
    """

    states: Mapping[ModelStage, StageState]
    source: Plan
    target: Plan
    later_s: float
    later_bytes: LinkBytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerCosts:
    """Prices by `planning`, for decoder models.

    Attributes:
      problem: the job; its workload, number of devices and efficiencies are replaced by what a
        call says.
      node_of: the node of a device; None: its host, cut into nodes of `Hardware.devices_per_node`.
      budget: what transitions need beside bytes and links.
      setup_s: of every change of plan: units taken apart and put together, digests, and the first
        launches of other programs.
      restart_s: from a checkpoint that is written to the first step after it, without reading and
        compiling: processes and their world.
      storage_bytes_per_s: of a checkpoint, for each device.
      compiler_threads: programs that are compiled at a time.
      compiler_apart: it takes nothing from the devices: what it does while the job goes on costs no
        step anything.
    """

    problem: PlanProblem
    node_of: Callable[[DeviceId], int] | None = None
    budget: TransitionBudget = dataclasses.field(default_factory=TransitionBudget)
    setup_s: float = 1.0
    restart_s: float = 30.0
    storage_bytes_per_s: float = 1e9
    compiler_threads: int = 1
    compiler_apart: bool = True

    def candidates(
        self,
        workload: Workload,
        pool: DevicePool,
        beliefs: Beliefs,
        *,
        current: ExecutionPlan,
        count: int,
        same_degrees: bool = False,
        surviving: bool = False,
    ) -> Candidates:
        """As `CostFunction`: the search's plans, and those that keep the degrees of what is
        trained, whose state then need not be cut anew; each search once more for plans whose
        replicas are whole, if such are wanted, also with replicas on different nodes."""
        problem = self._problem(workload, len(pool), beliefs)
        fixed = _degrees(current, None if same_degrees else Stage.TRAIN)
        free: dict[ModelStage, tuple[int, int]] = {}
        searches = [(fixed, count)]
        if not same_degrees:
            searches = [(free, count), (fixed, max(count // 2, 1))]
        found: list[Candidate] = []
        known: Known = {}
        shortage = ""
        for degrees, top in searches:
            if degrees and not same_degrees and found and _keeps(found[0].plan, degrees):
                continue  # the best plan of all keeps them
            views = list(_views(problem, pool, self._node))
            if surviving:
                views += [dataclasses.replace(view, zero1=False) for view in views]
            for view in views:
                held = dataclasses.replace(view, degrees=degrees)
                search = find_plans(held, top, APART, explain=not degrees and not found)
                shortage = shortage or _shortage_text(search, degrees)
                origin = "search, pp and tp kept" if degrees else "search"
                origin += "" if view.zero1 else ", whole replicas"
                as_it_is = (view.hardware, view.num_devices) == (problem.hardware, len(pool))
                for step in search.plans:
                    if as_it_is:
                        known |= searched_prices(problem, step)
                    plan = self._placed(step, pool, current)
                    price = self._price(problem, plan, beliefs, known)
                    found.append(Candidate(plan=plan, price=price, origin=origin))
                    if view.zero1 or price.survives:
                        continue
                    plan = _at(step, spread(pool.devices, self._node, _largest_unit(step)))
                    price = self._price(problem, plan, beliefs, known)
                    if price.survives:
                        found.append(Candidate(plan=plan, price=price, origin=f"{origin}, spread"))
        kept: list[Candidate] = []
        for candidate in sorted(found, key=lambda c: c.price.step_s):
            if candidate.price.fits and all(candidate.plan != c.plan for c in kept):
                kept.append(candidate)
        return Candidates(plans=tuple(kept), shortage="" if kept else shortage)

    def price(
        self, plan: ExecutionPlan, workload: Workload, pool: DevicePool, beliefs: Beliefs
    ) -> PlanPrice:
        """As `CostFunction`."""
        return self._price(self._problem(workload, len(pool), beliefs), plan, beliefs)

    def peak_bytes(
        self, plan: ExecutionPlan, workload: Workload, pool: DevicePool, beliefs: Beliefs
    ) -> float:
        """As `CostFunction`."""
        return plan_bytes(self._problem(workload, len(pool), beliefs), plan)

    def stage_seconds(
        self, plan: ExecutionPlan, model_stage: ModelStage, workload: Workload, beliefs: Beliefs
    ) -> Mapping[OperationClass, float]:
        """As `CostFunction`."""
        placement = plan.plan[model_stage]
        problem = self._problem(workload, placement.layout.num_devices, beliefs)
        return stage_class_seconds(problem, plan, model_stage, self._node_size(placement))

    def transition(
        self,
        source: ExecutionPlan,
        target: ExecutionPlan,
        beliefs: Beliefs,
        *,
        lost: frozenset[DeviceId] = frozenset(),
        hidden_s: float = 0.0,
        by_checkpoint: bool = False,
    ) -> TransitionEstimate:
        """As `CostFunction`."""
        compile_s = self._compile_s(source, target, beliefs)
        exposed_s = max(compile_s - hidden_s, 0.0) if self.compiler_apart else compile_s
        if by_checkpoint:
            found = self._restart(source, target, exposed_s)
        else:
            moved = self._as_it_moves(source, target, beliefs, lost)
            try:
                graph = self._graph(moved, source, target, beliefs, lost)
            except InfeasiblePlanError as error:
                return TransitionEstimate(executable=False, reason=str(error))
            found = self._estimate(graph, exposed_s, beliefs.transition_ratio, moved)
        return dataclasses.replace(found, compile_s=compile_s)

    def graph(
        self,
        source: ExecutionPlan,
        target: ExecutionPlan,
        beliefs: Beliefs,
        lost: frozenset[DeviceId] = frozenset(),
    ) -> tuple[TransitionGraph, float]:
        """The operations that `transition` prices, and what the first step after them needs on top.

        Args:
          source, target, beliefs, lost: as there.

        Raises:
          InfeasiblePlanError: there is no way that every device has the memory for.
        """
        moved = self._as_it_moves(source, target, beliefs, lost)
        return self._graph(moved, source, target, beliefs, lost), moved.later_s

    def _graph(
        self,
        moved: _Moved,
        source: ExecutionPlan,
        target: ExecutionPlan,
        beliefs: Beliefs,
        lost: frozenset[DeviceId],
    ) -> TransitionGraph:
        return plan_transition(
            moved.states,
            moved.source,
            moved.target,
            hardware=_derated(self.problem.hardware, beliefs.efficiencies),
            budget=self.budget,
            nodes=self._nodes(source, target),
            lost=lost,
            tables=self._tables,
        )

    def _node(self, device: DeviceId) -> int:
        if self.node_of is not None:
            return self.node_of(device)
        return device.host << 20 | device.index // self.problem.hardware.devices_per_node

    def _node_size(self, placement: Placement) -> int:
        return group_node_size(placement, self._node, self.problem.hardware.devices_per_node)

    def _problem(self, workload: Workload, num_devices: int, beliefs: Beliefs) -> PlanProblem:
        memory = dataclasses.replace(
            self.problem.memory,
            corrections={**self.problem.memory.corrections, **beliefs.corrections},
        )
        return dataclasses.replace(
            self.problem,
            workload=workload,
            num_devices=num_devices,
            efficiencies=beliefs.efficiencies,
            memory=memory,
        )

    def _price(
        self,
        problem: PlanProblem,
        plan: ExecutionPlan,
        beliefs: Beliefs,
        known: Known | None = None,
    ) -> PlanPrice:
        placements = plan.plan.placements
        made: dict[int, int] = {}
        sizes: dict[ModelStage, int] = {}
        for stage, placement in placements.items():
            if id(placement.devices) not in made:
                made[id(placement.devices)] = self._node_size(placement)
            sizes[stage] = made[id(placement.devices)]
        price = price_plan(problem, plan, sizes, known, beliefs.offsets.factors(plan))
        return dataclasses.replace(price, survives=survives(plan, self._node))

    def _placed(self, step: PlannedStep, pool: DevicePool, current: ExecutionPlan) -> ExecutionPlan:
        """A plan of positions on the devices of the pool, so that little moves."""
        blocks = [s.layout.tp for s in step.stages]
        held = [
            Held(
                old=current.plan[s.model_stage],
                layout=s.layout,
                first=s.first_device,
                num_bytes=self._state_bytes[s.model_stage],
            )
            for s in step.stages
            if self._state_bytes[s.model_stage] and s.model_stage in current.plan
        ]
        return _at(step, assign(pool.devices, self._node, blocks, held))

    @functools.cached_property
    def _tables(self) -> TransitionTables:
        return TransitionTables()

    @functools.cached_property
    def _states(self) -> dict[ModelStage, StageState]:
        p = self.problem
        states: dict[ModelStage, StageState] = {}
        stages = p.workflow.model_stages
        for model in {id(p.models[s.role]): p.models[s.role] for s in stages}.values():
            own = [s for s in stages if p.models[s.role] is model]
            states |= decoder_states(
                model, own, param_dtype=p.param_dtype, compute_dtype=p.compute_dtype
            )
        return {s: states[s] for s in stages}

    @functools.cached_property
    def _state_bytes(self) -> dict[ModelStage, float]:
        """Of one replica of what moves; 0 for what a weight edge fills."""
        return {
            stage: 0.0 if state.refreshed_by else float(_state_bytes(state))
            for stage, state in self._states.items()
        }

    def _as_it_moves(
        self,
        source: ExecutionPlan,
        target: ExecutionPlan,
        beliefs: Beliefs,
        lost: frozenset[DeviceId],
    ) -> _Moved:
        """The plans as a transition takes them.

        What is parked and filled by a weight edge in every step has nothing between two steps. What
        is parked with state of its own is put away where it was, and goes to its new place when it
        first comes back to devices; where devices of the old place are lost, it comes to devices
        first, and is put away from there.
        """
        ends: list[dict[ModelStage, Placement]] = []
        for plan in (source, target):
            idle = {s for s, c in plan.choices.items() if c.parked and self._refreshed(s)}
            ends.append({s: p for s, p in plan.plan.placements.items() if s not in idle})
        states: dict[ModelStage, StageState] = {}
        later_s, num_bytes = 0.0, 0
        hardware = _derated(self.problem.hardware, beliefs.efficiencies)
        for stage, state in self._states.items():
            choices = source.choices.get(stage), target.choices.get(stage)
            before, after = (c is not None and c.parked for c in choices)
            old, new = ends[0].get(stage), ends[1].get(stage)
            if after and old is not None and new is not None and old != new:
                after = lost.isdisjoint(old.devices)
                ends[1][stage] = old if after else new
                own = self._state_bytes[stage] / (new.layout.pp * new.layout.tp)
                later_s += hardware.host.seconds(own)
                later_s += hardware.inter_node.seconds(own) if after else 0.0
                num_bytes += int(own * new.layout.num_devices)
            frozen = state.optimizer is None and state.refreshed_by is None
            states[stage] = dataclasses.replace(
                state,
                zero1=choices[0] is not None and choices[0].zero1,
                zero1_after=choices[1] is not None and choices[1].zero1,
                recovery=(RecoverySource.CHECKPOINT,) if frozen else (),
                parked_before=before and not self._refreshed(stage),
                parked_after=after and not self._refreshed(stage),
            )
        return _Moved(
            states=states,
            source=Plan(placements=ends[0]),
            target=Plan(placements=ends[1]),
            later_s=later_s,
            later_bytes=LinkBytes(host=num_bytes, inter_node=num_bytes),
        )

    def _refreshed(self, stage: ModelStage) -> bool:
        return self._states[stage].refreshed_by is not None

    def _nodes(self, source: ExecutionPlan, target: ExecutionPlan) -> dict[DeviceId, int]:
        placements = (*source.plan.placements.values(), *target.plan.placements.values())
        distinct = {id(p.devices): p.devices for p in placements}.values()
        devices = {d for group in distinct for d in group}
        return {d: self._node(d) for d in devices}

    def _compile_s(self, source: ExecutionPlan, target: ExecutionPlan, beliefs: Beliefs) -> float:
        """Of the programs that the target needs and the source does not have."""
        changed = [
            s
            for s in target.choices
            if s not in source.choices
            or source.choices[s] != target.choices[s]
            or source.plan[s] != target.plan[s]
        ]
        programs = sum(PROGRAMS[s.stage] for s in changed)
        each_s = COMPILE_S / beliefs.efficiencies[OperationClass.COMPILE]
        return -(-programs // self.compiler_threads) * each_s

    def _estimate(
        self, graph: TransitionGraph, exposed_s: float, ratio: float, moved: _Moved
    ) -> TransitionEstimate:
        parts = {
            "move": graph.transition_s * ratio,
            "setup": self.setup_s * ratio,
            "compile": exposed_s,
        }
        if moved.later_s:
            parts["unpark"] = moved.later_s
        taken = [choice.prices[choice.way].link_bytes for choice in graph.choices.values()]
        return TransitionEstimate(
            executable=True,
            seconds=sum(parts.values()),
            parts_s=parts,
            link_bytes=sum(taken, moved.later_bytes),
            device_bytes=dict(zip(graph.devices, graph.peak_bytes, strict=True)),
        )

    def _restart(
        self, source: ExecutionPlan, target: ExecutionPlan, exposed_s: float
    ) -> TransitionEstimate:
        """Every device writes and reads what it has of the state, then the job starts anew."""
        read_s, write_s, total = 0.0, 0.0, 0
        for stage, num_bytes in self._state_bytes.items():
            new, old = target.plan[stage].layout, source.plan[stage].layout
            own = num_bytes / (new.pp * new.tp)
            read_s += own / self.storage_bytes_per_s
            write_s += num_bytes / old.num_devices / self.storage_bytes_per_s
            total += int(own * new.num_devices)
        parts = {
            "write": write_s,
            "read": read_s,
            "setup": self.restart_s,
            "compile": exposed_s,
        }
        return TransitionEstimate(
            executable=True,
            seconds=sum(parts.values()),
            parts_s=parts,
            link_bytes=LinkBytes(storage=total),
        )


def _at(step: PlannedStep, order: tuple[DeviceId, ...]) -> ExecutionPlan:
    """A plan of positions on devices in an order."""
    spans: dict[range, tuple[DeviceId, ...]] = {}
    for s in step.stages:
        if s.positions not in spans:
            spans[s.positions] = order[s.positions.start : s.positions.stop]
    return ExecutionPlan(
        plan=Plan(
            placements={
                s.model_stage: Placement(layout=s.layout, devices=spans[s.positions])
                for s in step.stages
            }
        ),
        choices={s.model_stage: s.choice for s in step.stages},
    )


def _largest_unit(step: PlannedStep) -> int:
    """Devices of the largest replica of what is trained."""
    layouts = [s.layout for s in step.stages if s.model_stage.stage is Stage.TRAIN]
    return max(layout.pp * layout.tp for layout in layouts)


def _state_bytes(state: StageState) -> int:
    """Of one replica, whole."""
    specs: list[EmuSpec] = [state.parameters]
    if state.optimizer is not None:
        specs.append(state.optimizer)
    return sum(leaf.num_bytes for spec in specs for leaf in spec)


def _degrees(plan: ExecutionPlan, stage: Stage | None) -> dict[ModelStage, tuple[int, int]]:
    """(pp, tp) of the model-stages of a stage; None: of all."""
    return {
        s: (p.layout.pp, p.layout.tp)
        for s, p in plan.plan.placements.items()
        if stage is None or s.stage is stage
    }


def _keeps(plan: ExecutionPlan, degrees: Mapping[ModelStage, tuple[int, int]]) -> bool:
    layouts = {s: plan.plan[s].layout for s in degrees}
    return all((layouts[s].pp, layouts[s].tp) == wanted for s, wanted in degrees.items())


def _views(
    problem: PlanProblem, pool: DevicePool, node_of: Callable[[DeviceId], int]
) -> Iterator[PlanProblem]:
    """The pool as tidy nodes: as it is where all but one are full; else as blocks that are."""
    full = problem.hardware.devices_per_node
    counts = [len(d) for d in node_counts(pool.devices, node_of).values()]
    if sum(c != full for c in counts) <= 1 or max(counts) == 1:
        yield problem
        return
    seen: set[int] = set()
    for block in reversed(divisors(full)):
        num_devices = sum(c // block * block for c in counts)
        if num_devices and num_devices not in seen and len(seen) < UNEVEN_SEARCHES:
            seen.add(num_devices)
            hardware = dataclasses.replace(problem.hardware, devices_per_node=block)
            yield dataclasses.replace(problem, hardware=hardware, num_devices=num_devices)


def _shortage_text(search: PlanSearch, degrees: Mapping[ModelStage, tuple[int, int]]) -> str:
    shortage = search.shortage
    if shortage is None:
        return "the pp and tp that are to stay do not fit the devices" if degrees else ""
    where = "all model-stages together" if shortage.model_stage is None else shortage.model_stage
    return (
        f"{where} need at least {shortage.needed_bytes / 2**30:.1f} GiB of a device, "
        f"{shortage.limit_bytes / 2**30:.1f} GiB may be used; use {shortage.advice}"
    )


def _derated(hardware: Hardware, efficiencies: Efficiencies) -> Hardware:
    """With links as fast as they were measured."""

    def link(peak: Link, operation: OperationClass) -> Link:
        reached = efficiencies[operation]
        return Link(bytes_per_s=peak.bytes_per_s * reached, latency_s=peak.latency_s / reached)

    return dataclasses.replace(
        hardware,
        intra_node=link(hardware.intra_node, OperationClass.P2P_INTRA),
        inter_node=link(hardware.inter_node, OperationClass.P2P_INTER),
        host=link(hardware.host, OperationClass.HOST_COPY),
    )
