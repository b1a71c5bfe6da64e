"""The logical state of a run: what must survive every change of plan, every resume and every
loss."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nereus_jax.core.architectures import Head
from nereus_jax.core.devices import DeviceId
from nereus_jax.core.roles import (
    ACTOR_TRAIN,
    CRITIC_TRAIN,
    REFERENCE_SCORE,
    REWARD_SCORE,
    ModelStage,
    Role,
)
from nereus_jax.core.timeline import Span
from nereus_jax.core.workflow import WeightEdge
from nereus_jax.models.huggingface import TensorSource
from nereus_jax.runtime import host
from nereus_jax.runtime.blocks import BlockViews
from nereus_jax.runtime.emu import Params, initialize, live_bytes_per_device, load
from nereus_jax.runtime.engines.train import TrainState
from nereus_jax.runtime.faults import find_lost
from nereus_jax.runtime.parking import Tree, in_host_memory, is_parked, on_devices
from nereus_jax.runtime.world import World
from nereus_jax.trainer.edges import make_transfer, run_transfer
from nereus_jax.trainer.job import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """The part of the logical state that is no array.

    Attributes:
      step: RL steps done.
      data_position: samples of the prompt stream consumed, dropped ones included.
      samples: rows generated in training so far; each row's number names its random draws.
      policy_version: optimizer updates of the actor.
      critic_version: optimizer updates of the critic.
      kl_coef: weight of the KL penalty, which an adaptive controller changes.
    """

    step: int = 0
    data_position: int = 0
    samples: int = 0
    policy_version: int = 0
    critic_version: int = 0
    kl_coef: float = 0.0

    def version_of(self, stage: ModelStage) -> int:
        """Optimizer updates of the model of a model-stage that is trained."""
        return self.policy_version if stage.role is Role.ACTOR else self.critic_version

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Counters(**x)` reads them."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(kw_only=True)
class JobState:
    """All state of a run. The trainer replaces its members; nothing else keeps them."""

    counters: Counters
    trained: dict[ModelStage, TrainState]
    frozen: Mapping[ModelStage, Params]
    edges: dict[ModelStage, tuple[int, Params]] = dataclasses.field(default_factory=dict)
    at_work: dict[ModelStage, Params] = dataclasses.field(default_factory=dict)
    """Copies on devices of parked weights, while their model-stages run (`trainer/parked`)."""
    views: BlockViews = dataclasses.field(default_factory=BlockViews)
    """The blocks of the arrays, for when some of them are lost."""
    updating: bool = False
    """Whether an update of the running step has begun: the state before the step is gone."""

    def take_over(self, other: "JobState") -> None:
        """What another one holds is held from now on, and nothing else."""
        self.counters, self.trained, self.frozen = other.counters, other.trained, other.frozen
        self.edges, self.at_work = {}, {}
        self.updating = False

    def checkpointed(self) -> dict[str, TrainState]:
        """What a checkpoint holds beside the counters, by role."""
        return {stage.role.value: state for stage, state in self.trained.items()}

    def arrays(self) -> list[jax.Array]:
        """All arrays that are held."""
        edges = [params for _, params in self.edges.values()]
        trees = [self.trained, dict(self.frozen), edges, self.at_work]
        return list({id(x): x for x in jax.tree.leaves(trees)}.values())

    def live_bytes(self, world: World) -> dict[str, int]:
        """Local device -> bytes of state in its memory; arrays that edges share count once."""
        held = [x for x in self.arrays() if not is_parked(x.sharding)]
        totals = live_bytes_per_device({str(i): x for i, x in enumerate(held)})
        local = {d: handle for d, handle in world.handles.items() if world.is_local(d)}
        return {str(d): totals.get(handle, 0) for d, handle in local.items()}


def initial_actor_params(job: Job) -> Params:
    """The weights of the actor of the configured path, or random ones."""
    site, config = job.sites[ACTOR_TRAIN], job.config
    if config.model.path:
        return load(
            job.trains[ACTOR_TRAIN].spec, site, TensorSource(config.model.path, Head.LM).read
        )
    return initialize(job.inputs.model, Head.LM, site, config.model.param_dtype, config.seed)


def initial_critic(job: Job, actor: Mapping[str, jax.Array]) -> TrainState:
    """A critic that starts as the actor with a scalar head of zeros."""
    source, target = job.sites[ACTOR_TRAIN], job.sites[CRITIC_TRAIN]
    spec = job.trains[CRITIC_TRAIN].spec
    shared = dataclasses.replace(spec, leaves=tuple(x for x in spec if x.name != "scalar_head"))
    copy = make_transfer(
        job.world, job.trains[ACTOR_TRAIN].spec, source, shared, target, share=False
    )
    params = run_transfer(copy, actor)
    head = spec["scalar_head"]
    sharding = target.leaf_sharding(head, spec.rules)
    params["scalar_head"] = host.put(np.zeros(head.shape, np.dtype(head.dtype)), sharding)
    critic = job.trains[CRITIC_TRAIN].init({leaf.name: params[leaf.name] for leaf in spec})
    return as_planned(job, CRITIC_TRAIN, critic)


def frozen_models(job: Job, actor: Mapping[str, jax.Array]) -> dict[ModelStage, Params]:
    """The reference (a copy of the actor as it is now) and the reward model."""
    frozen: dict[ModelStage, Params] = {}
    if REFERENCE_SCORE in job.sites:
        copy = make_transfer(
            job.world,
            job.trains[ACTOR_TRAIN].spec,
            job.sites[ACTOR_TRAIN],
            job.model_spec(REFERENCE_SCORE),
            job.sites[REFERENCE_SCORE],
            share=False,
        )
        reference = run_transfer(copy, actor)
        frozen[REFERENCE_SCORE] = as_planned(job, REFERENCE_SCORE, reference)
    if REWARD_SCORE in job.sites:
        source = TensorSource(job.config.reward.model_path, Head.SCALAR)
        spec = job.model_spec(REWARD_SCORE)
        reward = load(spec, job.sites[REWARD_SCORE], source.read)
        frozen[REWARD_SCORE] = as_planned(job, REWARD_SCORE, reward)
    return frozen


def refresh_edges(job: Job, state: JobState) -> tuple[Span, ...]:
    """Brings the weights of every edge up to date with their source; returns when each moved."""
    spans: list[Span] = []
    for edge in job.workflow.weight_edges:
        start_s, begin_s = time.time(), time.perf_counter()  # only the second never steps back
        before = state.edges.get(edge.target)
        params = refresh_edge(job, state, edge)
        jax.block_until_ready(params)
        moved = before is not state.edges[edge.target]
        span = Span(
            name=f"{edge.source}->{edge.target}",
            kind="weight_edge",
            start_s=start_s,
            end_s=start_s + time.perf_counter() - begin_s,
            devices=tuple(str(d) for d in job.plan[edge.target].devices),
            step=state.counters.step,
            bytes=job.edges[edge.target].schedule.wire_bytes if moved else 0,
        )
        spans.append(span)
    return tuple(spans)


def refresh_edge(job: Job, state: JobState, edge: WeightEdge) -> Params:
    """The current weights at the target of one edge; moved only if the source has changed."""
    version = state.counters.version_of(edge.source)
    held = state.edges.get(edge.target)
    if held is not None and held[0] == version:
        return held[1]
    state.edges.pop(edge.target, None)  # the old weights make room for the new ones
    # Between devices, whatever is parked: links are faster than hosts.
    params = run_transfer(job.edges[edge.target], on_devices(state.trained[edge.source].params))
    params = as_planned(job, edge.target, params)
    state.edges[edge.target] = (version, params)
    return params


def as_planned(job: Job, stage: ModelStage, tree: Tree) -> Tree:
    """State of a model-stage that has been made on devices, where it waits for its calls: in host
    memory if the plan parks it."""
    if not job.execution.choices[stage].parked:
        return tree
    # Waits, so that its room is there for what is made next.
    return jax.block_until_ready(in_host_memory(tree))


def missing_devices(job: Job, state: JobState) -> frozenset[DeviceId]:
    """Devices of this process whose blocks of the state are gone.

    An update that has begun takes over what is trained: its blocks being gone means nothing then.
    """
    arrays = jax.tree.leaves(dict(state.frozen)) if state.updating else state.arrays()
    return find_lost(job.world, arrays, state.views)


def drop_edges(job: Job, state: JobState, source: ModelStage) -> None:
    """Gives up the weights that came from `source`, which is about to be trained.

    They may be the very arrays that the update takes over.
    """
    for edge in job.workflow.weight_edges:
        if edge.source == source:
            state.edges.pop(edge.target, None)


def stage_params(job: Job, state: JobState, stage: ModelStage) -> Params:
    """The weights with which a GENERATE or SCORE stage runs now."""
    if stage in state.at_work:
        return state.at_work[stage]
    if stage in state.frozen:
        return state.frozen[stage]
    return state.edges[stage][1]
