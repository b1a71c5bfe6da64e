# pyright: reportUnknownMemberType=false
# (some of numpy's overloads have unknown parts)
"""The simulated cluster: what a step of a plan takes on it, and how much memory.

A controller sees of it what a real run shows: seconds, bytes and lengths of steps that have run.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nereus_jax.control.device_assignment import group_node_size
from nereus_jax.core.devices import DeviceId, DevicePool
from nereus_jax.core.emu_spec import DTYPE_BYTES
from nereus_jax.core.execution_plan import ExecutionPlan
from nereus_jax.core.packed_cuts import SCORE_FLUSH_PER_RANK
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ModelStage, Stage
from nereus_jax.core.timeline import Span
from nereus_jax.core.workflow import WeightEdge
from nereus_jax.planning.cost import OUR_ENGINES
from nereus_jax.planning.cost_step import StepCost, step_seconds
from nereus_jax.planning.cost_terms import ModelSizes
from nereus_jax.planning.plan_price import plan_bytes
from nereus_jax.planning.predict import candidates_of
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.conditions import Conditions
from nereus_jax.simulator.curves import Truth, load_truth
from nereus_jax.simulator.decoding import generate_s
from nereus_jax.simulator.operations import Device
from nereus_jax.simulator.passes import score_s, train_s
from nereus_jax.simulator.stage_run import StageRun, StepRows

Floats = NDArray[np.float64]

Known = dict[tuple[object, ...], float]
"""Seconds of a call by model-stage, placement and choice."""

ROOM_TOKENS = 128
"""Programs have room for the longest response, rounded up to a multiple of this."""
MEMORY_TAG = 5
STAGE_STDS = ("score_std", "train_std", "generate_std")
MOST_SIGMAS = 2.0
"""Errors of a memory model are no larger than so many standard deviations: its worst case was
looked at before it was used."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """What a step meets, whatever its plan.

    Attributes:
      rows: of the step.
      step: its number.
      room_tokens: response tokens that its programs have room for.
      factors: [devices] seconds of each device over those of a usual one.
      network: what the network between nodes reaches over what it usually does.
      slowdown: of everything, by what runs beside it.
      known: seconds of calls, which are added to: plans that are compared differ in few.
    """

    rows: StepRows
    step: int
    room_tokens: int
    factors: Floats
    network: float
    slowdown: float = 1.0
    known: Known = dataclasses.field(default_factory=dict[tuple[object, ...], float])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step was like.

    Attributes:
      step_s: from the first weight edge to the end of the last model-stage.
      stage_s: of each model-stage in all its calls.
      peak_bytes: of the fullest device, as its programs ask for.
      used_bytes: the same with what the allocator cannot give away.
      capacity_bytes: of a device.
      room_tokens: response tokens that the programs had room for.
      spans: when each call ran, from the start of the step on.
    """

    step_s: float
    stage_s: Mapping[ModelStage, float]
    peak_bytes: int
    used_bytes: int
    capacity_bytes: int
    room_tokens: int
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def out_of_memory(self) -> bool:
        """Whether the step did not fit, and broke off."""
        return self.used_bytes > self.capacity_bytes

    def updates_at(self, seconds: float) -> bool:
        """Whether an update had begun so many seconds after the step's start."""
        starts = [s.start_s for s in self.spans if f"-{Stage.TRAIN}" in s.name]
        return min(starts, default=math.inf) < seconds


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Location:
    """Where a placement lies on a cluster.

    Attributes:
      places: of its devices among all.
      node_size: devices of its groups of ranks that share a node.
    """

    places: NDArray[np.int64]
    node_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedCluster:
    """Nodes with a job on them.

    Attributes:
      problem: the job; of its workload the rows, minibatches and epochs count.
      nodes: of the cluster.
      seed: draws what differs between nodes and moments.
      truth: what is reached of the hardware.
      stage_factors: of the seconds of model-stages, where a run of the job was measured.
      between_s: of every step beside its model-stages and weight edges, as measured.
    """

    problem: PlanProblem
    nodes: int
    seed: int
    truth: Truth = dataclasses.field(default_factory=load_truth)
    stage_factors: Mapping[ModelStage, float] = dataclasses.field(
        default_factory=dict[ModelStage, float]
    )
    between_s: float = 0.0

    @property
    def devices_per_node(self) -> int:
        """Of every node."""
        return self.problem.hardware.devices_per_node

    @functools.cached_property
    def pool(self) -> DevicePool:
        """All devices; a device's host is its node."""
        return DevicePool.uniform(self.nodes, self.devices_per_node, self.problem.hardware.name)

    def devices_of(self, nodes: tuple[int, ...]) -> tuple[DeviceId, ...]:
        """Of some nodes."""
        return tuple(DeviceId(n, i) for n in nodes for i in range(self.devices_per_node))

    @functools.cached_property
    def conditions(self) -> Conditions:
        """Of its nodes over time."""
        return Conditions(
            scatter=self.truth.scatter,
            nodes=self.nodes,
            devices_per_node=self.devices_per_node,
            seed=self.seed,
        )

    def place(self, device: DeviceId) -> int:
        """Of a device among all of them."""
        return device.host * self.devices_per_node + device.index

    @functools.cached_property
    def _memory_problem(self) -> PlanProblem:
        """The job with the memory that programs really need."""
        rng = np.random.default_rng([self.seed, MEMORY_TAG])
        std = self.truth.memory.temporaries_std
        drawn = np.clip(rng.standard_normal(len(Stage)), -MOST_SIGMAS, MOST_SIGMAS)
        factors = {s: math.exp(std * float(x)) for s, x in zip(Stage, drawn, strict=True)}
        memory = dataclasses.replace(self.problem.memory, corrections=factors)
        return dataclasses.replace(self.problem, memory=memory)

    def moment(self, rows: StepRows, step: int, time_s: float, slowdown: float = 1.0) -> Moment:
        """The conditions that a step meets.

        Args:
          rows: of the step.
          step: its number.
          time_s: when it starts.
          slowdown: of everything, by what runs beside it.
        """
        return Moment(
            rows=rows,
            step=step,
            room_tokens=self.room_tokens(rows),
            factors=self.conditions.device_factors(step, time_s),
            network=self.conditions.network(time_s),
            slowdown=slowdown,
        )

    def run_step(self, plan: ExecutionPlan, moment: Moment, plan_steps: int) -> StepOutcome:
        """One step.

        Args:
          plan: that runs.
          moment: what it meets.
          plan_steps: that the plan has run since it came, or since the job started.
        """
        stage_s, cost = self.time_step(plan, moment)
        needed = self.peak_bytes(plan, moment.rows, moment.room_tokens)
        share = 1.0 - math.exp(-plan_steps / self.truth.memory.fragmentation_steps)
        return StepOutcome(
            step_s=cost.step_s,
            stage_s=stage_s,
            peak_bytes=int(needed),
            used_bytes=int(needed * (1.0 + self.truth.memory.fragmentation * share)),
            capacity_bytes=self.problem.hardware.memory_bytes,
            room_tokens=moment.room_tokens,
            spans=cost.spans,
        )

    def time_step(
        self, plan: ExecutionPlan, moment: Moment
    ) -> tuple[Mapping[ModelStage, float], StepCost]:
        """Seconds of a step, whether its memory suffices or not: of each model-stage in all its
        calls, and of the whole."""
        problem, workflow = self.problem, self.problem.workflow
        call_s = {s: self._noisy_call_s(plan, s, moment) for s in workflow.model_stages}
        positions = {s: self._places(plan.plan[s]).tolist() for s in workflow.model_stages}
        parked = {
            s: x + self._park_s(plan, s) / max(problem.calls(s), 1) for s, x in call_s.items()
        }
        edges = {e: self._edge_s(plan, e, moment.network) for e in workflow.weight_edges}
        cost = step_seconds(workflow, parked, positions, edges, step=moment.step)
        if self.between_s:
            cost = dataclasses.replace(cost, step_s=cost.step_s + self.between_s)
        return {s: x * problem.calls(s) for s, x in call_s.items()}, cost

    def step_s_within(self, plan: ExecutionPlan, moment: Moment, limit_s: float) -> float:
        """Seconds of a step; inf as soon as a device is seen to be busy for longer than a limit."""
        busy_s = np.zeros(self.nodes * self.devices_per_node)
        for stage in self.problem.workflow.model_stages:
            own_s = self.problem.calls(stage) * self._noisy_call_s(plan, stage, moment)
            busy_s[self._places(plan.plan[stage])] += own_s
            if busy_s.max() > limit_s:
                return math.inf
        return self.time_step(plan, moment)[1].step_s

    def _noisy_call_s(self, plan: ExecutionPlan, stage: ModelStage, moment: Moment) -> float:
        """Seconds of one call."""
        key = stage, plan.plan[stage], plan.choices[stage]
        if key not in moment.known:
            factors = moment.factors[self._places(plan.plan[stage])]
            noise = self.conditions.stage_factor(moment.step, stage)
            factor = moment.slowdown * noise * self.stage_factors.get(stage, 1.0)
            moment.known[key] = factor * self._call_s(plan, stage, moment, factors)
        return moment.known[key]

    def usual_s(
        self, plan: ExecutionPlan, rows: StepRows
    ) -> tuple[Mapping[ModelStage, float], float]:
        """Seconds of all calls of each model-stage, and of the step, without any noise."""
        usual = Moment(
            rows=rows,
            step=0,
            room_tokens=self.room_tokens(rows),
            factors=np.ones(self.nodes * self.devices_per_node),
            network=1.0,
        )
        still = dataclasses.replace(self.truth.scatter, **dict.fromkeys(STAGE_STDS, 0.0))
        quiet = dataclasses.replace(self, truth=dataclasses.replace(self.truth, scatter=still))
        stage_s, cost = quiet.time_step(plan, usual)
        return stage_s, cost.step_s

    def room_tokens(self, rows: StepRows) -> int:
        """That the programs of a step have room for."""
        longest = int(rows.responses.max())
        room = -(-longest // ROOM_TOKENS) * ROOM_TOKENS
        return max(min(room, self.problem.workload.max_response_tokens), longest)

    def workload_of(self, rows: StepRows, margin: float = 1.0) -> Workload:
        """The work of a step, with room for responses that are longer by a factor."""
        template = self.problem.workload
        responses = LengthHistogram.from_samples(int(x) for x in rows.responses)
        room = max(int(rows.responses.max() * margin), responses.max)
        return dataclasses.replace(
            template,
            prompt_lengths=LengthHistogram.from_samples(int(x) for x in rows.prompts),
            response_lengths=responses,
            max_response_tokens=max(min(room, template.max_response_tokens), responses.max),
        )

    def peak_bytes(self, plan: ExecutionPlan, rows: StepRows, room: int) -> float:
        """Of the fullest device, before fragmentation."""
        problem, prompt = self._memory_problem, int(rows.prompts.max())
        key = room, prompt
        known = self._known_peaks.setdefault(id(plan), (plan, {}))[1]
        if key not in known:  # a plan runs many steps that have the same room
            workload = dataclasses.replace(
                problem.workload,
                prompt_lengths=LengthHistogram.constant(prompt),
                response_lengths=LengthHistogram.constant(room),
                max_response_tokens=room,
            )
            needed = plan_bytes(dataclasses.replace(problem, workload=workload), plan)
            known[key] = needed + problem.memory.reserved_bytes
        return known[key]

    @functools.cached_property
    def _known_peaks(self) -> dict[int, tuple[ExecutionPlan, dict[tuple[int, int], float]]]:
        """By the identity of a plan, which is held so that it stays its own."""
        return {}

    def _places(self, placement: Placement) -> NDArray[np.int64]:
        """Of a placement's devices."""
        return self._location(placement).places

    def _location(self, placement: Placement) -> "_Location":
        """Where a placement lies; kept, as it is asked for at every step."""
        known = self._known_locations.get(placement)
        if known is None:
            known = self._known_locations[placement] = _Location(
                places=np.array([self.place(d) for d in placement.devices]),
                node_size=group_node_size(placement, _host, self.devices_per_node),
            )
        return known

    @functools.cached_property
    def _known_locations(self) -> "dict[Placement, _Location]":
        return {}

    def device(self, placement: Placement, network: float) -> Device:
        """One of a placement."""
        return Device(
            hardware=self.problem.hardware,
            truth=self.truth,
            dtype=self.problem.compute_dtype,
            devices_per_node=self._location(placement).node_size,
            network=network,
        )

    def stage_run(
        self, plan: ExecutionPlan, stage: ModelStage, rows: StepRows, room: int
    ) -> StageRun:
        """How a model-stage runs a step."""
        p, layout = self.problem, plan.plan[stage].layout
        c = candidates_of(p.workload, [stage], plan)
        flush = plan.choices[stage].microbatches
        if stage.stage is Stage.SCORE:
            flush = SCORE_FLUSH_PER_RANK * layout.pp
        return StageRun(
            sizes=ModelSizes.of(p.models[stage.role], p.head(stage)),
            train=stage.stage is Stage.TRAIN,
            layout=layout,
            microbatch_size=int(c.microbatch_size[0]),
            flush=flush,
            remat=bool(c.remat[0]),
            zero1=bool(c.zero1[0]),
            execution=OUR_ENGINES,
            minibatch_size=p.workload.minibatch_size,
            epochs=p.workload.epochs,
            room_tokens=room,
            prompt_tokens=int(rows.prompts.max()),
        )

    def _call_s(
        self,
        plan: ExecutionPlan,
        stage: ModelStage,
        moment: Moment,
        factors: Floats,
    ) -> float:
        """Seconds of one call, without the noise of the whole model-stage."""
        rows = moment.rows
        run = self.stage_run(plan, stage, rows, moment.room_tokens)
        layout = run.layout
        slow = factors.reshape(layout.dp, layout.pp, layout.tp).max(axis=2)
        device = self.device(plan.plan[stage], moment.network)
        if stage.stage is Stage.GENERATE:
            return generate_s(run, device, rows, slow)
        return (train_s if run.train else score_s)(run, device, rows, slow)

    def _edge_s(self, plan: ExecutionPlan, edge: WeightEdge, network: float) -> float:
        """Every device of the target receives what it lacks of its part."""
        p, layout = self.problem, plan.plan[edge.target].layout
        model_bytes = p.models[edge.target.role].num_params(p.head(edge.target))
        own = model_bytes * DTYPE_BYTES[p.compute_dtype] / (layout.pp * layout.tp)
        hosts = {d.host for s in (edge.source, edge.target) for d in plan.plan[s].devices}
        device = self.device(plan.plan[edge.target], network)
        return float(device.send(own, crosses_nodes=len(hosts) > 1))

    def _park_s(self, plan: ExecutionPlan, stage: ModelStage) -> float:
        """Of bringing a parked model-stage back from its host, and away again where it changed."""
        if not plan.choices[stage].parked:
            return 0.0
        p, layout = self.problem, plan.plan[stage].layout
        train = stage.stage is Stage.TRAIN
        each = 3 * DTYPE_BYTES[p.param_dtype] if train else DTYPE_BYTES[p.compute_dtype]
        own = each * p.models[stage.role].num_params(p.head(stage)) / (layout.pp * layout.tp)
        one = self.device(plan.plan[stage], 1.0).host_copy(own)
        return (2 if train else 1) * one


def _host(device: DeviceId) -> int:
    return device.host
