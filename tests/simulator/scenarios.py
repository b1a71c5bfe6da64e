"""Small jobs on small simulated clusters."""

import dataclasses

import numpy as np

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.presets import preset
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import ALGORITHMS, policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.length_traces import lognormal_shape, relative
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.setup import make_scenario
from nereus_jax.simulator.traces import DriftTrace, PoolChange

SMALL = DecoderConfig(
    num_layers=12,
    embed_dim=1536,
    num_heads=12,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=4096,
    vocab_size=32_000,
)
MODELS = {"small": SMALL, "qwen2.5-0.5b": preset("qwen2.5-0.5b"), "llama3-8b": preset("llama3-8b")}


def make_problem(
    *,
    algorithm: str = "ppo",
    model: str = "small",
    hardware: str = "a100-40gb",
    devices_per_node: int = 4,
    memory_share: float = 1.0,
    prompts: int = 32,
    cut_tokens: int = 4096,
) -> PlanProblem:
    """A job; its devices have a share of the memory of the real ones."""
    base = load_hardware(hardware)
    machine = dataclasses.replace(
        base,
        devices_per_node=devices_per_node,
        memory_bytes=int(base.memory_bytes * memory_share),
    )
    samples = 4 if ALGORITHMS[algorithm].grouped else 1
    return PlanProblem(
        workflow=policy_gradient(
            algorithm, reward_model=True, reference=True, recompute_old_logprobs=True
        ),
        models=dict.fromkeys(Role, MODELS[model]),
        workload=Workload(
            prompts=prompts,
            samples_per_prompt=samples,
            prompt_lengths=LengthHistogram(lengths=(64, 128), weights=(0.5, 0.5)),
            response_lengths=LengthHistogram.constant(256),
            max_response_tokens=cut_tokens,
            minibatch_size=prompts * samples // 2,
        ),
        hardware=machine,
        num_devices=devices_per_node,
    )


def make_trace(
    *changes: tuple[float, int],
    nodes: int = 2,
    steps: int = 6,
    tokens: tuple[float, float] = (200.0, 200.0),
    sigma: float = 0.6,
    by_step: bool = True,
    notice_s: float = 0.0,
) -> DriftTrace:
    """Lengths grow from the first to the second number of tokens."""
    return DriftTrace(
        name="test",
        mean_tokens=np.geomspace(*tokens, steps),
        shape=relative(lognormal_shape(sigma)),
        nodes=nodes,
        changes=tuple(PoolChange(at=at, nodes=n) for at, n in changes),
        by_step=by_step,
        notice_s=notice_s,
    )


def small_scenario(trace: DriftTrace | None = None, *, seed: int = 0, **job: object) -> Scenario:
    """On as many nodes as the trace ever has."""
    trace = trace or make_trace()
    return make_scenario(make_problem(**job), trace, trace.most_nodes, seed)  # type: ignore[arg-type]
