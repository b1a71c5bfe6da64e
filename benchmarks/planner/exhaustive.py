"""Every combination there is, for small instances: what the search must equal.

Written without the search's code: lanes, parking and memory are counted here once more.
"""

import itertools
import random
from collections.abc import Iterator

import numpy as np

from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.roles import ModelStage, Role
from nereus_jax.core.workflow import policy_gradient
from nereus_jax.planning.frontier import StageOptions
from nereus_jax.planning.memory import MemoryModel
from nereus_jax.planning.memory_coefficients import COEFFICIENTS
from nereus_jax.planning.search_lanes import make_cells
from nereus_jax.planning.search_problem import PlanProblem, Pricer
from nereus_jax.planning.workload import LengthHistogram, Workload

MOST_CANDIDATES = {1: 40, 2: 6, 3: 3, 4: 2}
"""Of a model-stage, by the model-stages of its wave: so many that all combinations can be tried."""


def random_problem(seed: int) -> PlanProblem:
    """A small job on 1 to 4 devices; about half of them are short of memory."""
    rng = random.Random(seed)
    heads = rng.choice((2, 3, 4, 6))
    model = DecoderConfig(
        num_layers=rng.randint(1, 6),
        embed_dim=rng.choice((256, 512)),
        num_heads=heads,
        num_kv_heads=rng.choice([d for d in (1, 2, 3) if heads % d == 0]),
        head_dim=64,
        mlp_dim=rng.choice((768, 1536)),
        vocab_size=rng.choice((1000, 8000)),
    )
    link = Link(bytes_per_s=10 ** rng.uniform(8, 10), latency_s=1e-5)
    algorithm = rng.choice(("ppo", "grpo", "remax"))
    return PlanProblem(
        workflow=policy_gradient(
            algorithm,
            reward_model=rng.random() < 0.5,
            reference=True,
            recompute_old_logprobs=rng.random() < 0.5,
        ),
        models=dict.fromkeys(Role, model),
        workload=Workload(
            prompts=rng.choice((8, 12, 24)),
            prompt_lengths=LengthHistogram.constant(rng.choice((16, 64))),
            response_lengths=LengthHistogram(lengths=(32, 128), weights=(0.5, 0.5)),
            max_response_tokens=128,
            minibatch_size=rng.choice((4, 8)),
        ),
        hardware=Hardware(
            name="random",
            devices_per_node=4,
            peak_flops_per_s={"float32": 10 ** rng.uniform(10, 12)},
            memory_bytes=int(10 ** rng.uniform(7.9, 9.0)),
            memory_bytes_per_s=1e10,
            intra_node=link,
            inter_node=link,
            host=Link(bytes_per_s=10 ** rng.uniform(7, 9), latency_s=0.0),
        ),
        num_devices=rng.randint(1, 4),
        memory=MemoryModel(coefficients=COEFFICIENTS["cpu"]),
        compute_dtype="float32",
        park=rng.random() < 0.7,
    )


def sampled_options(problem: PlanProblem, seed: int) -> list[list[StageOptions]]:
    """The priced candidates of every wave, few enough of each model-stage."""
    rng, pricer = np.random.default_rng(seed), Pricer(problem)
    waves: list[list[StageOptions]] = []
    for wave in problem.waves():
        waves.append([])
        for stage in wave:
            options = pricer.price(stage).options
            count = min(MOST_CANDIDATES[len(wave)], len(options.candidates))
            chosen = np.sort(rng.choice(len(options.candidates), count, replace=False))
            waves[-1].append(_take(options, stage, chosen))
    return waves


def _take(options: StageOptions, stage: ModelStage, chosen: np.ndarray) -> StageOptions:
    park = options.park_seconds
    return StageOptions(
        model_stage=stage,
        candidates=options.candidates.take(chosen),
        seconds=options.seconds[chosen],
        held_bytes=options.held_bytes[chosen],
        working_bytes=options.working_bytes[chosen],
        park_seconds=None if park is None else park[chosen],
    )


def best_seconds(waves: list[list[StageOptions]], devices: int, node: int, limit: float) -> float:
    """The fewest seconds of all combinations that fit; inf where none does."""
    rows = [
        np.unique(np.array([*_ways(stages, devices, node)]).reshape(-1, 3), axis=0)
        for stages in waves
    ]
    best = np.inf
    *outer, last = rows
    for ways in itertools.product(*outer):
        seconds = sum(w[0] for w in ways) + last[:, 0]
        resident = sum(w[1] for w in ways) + last[:, 1]
        working = np.maximum(max(w[2] for w in ways), last[:, 2])
        fits = resident + working <= limit
        best = min(best, float(np.where(fits, seconds, np.inf).min(initial=np.inf)))
    return best


def _ways(
    stages: list[StageOptions], devices: int, node: int
) -> Iterator[tuple[float, float, float]]:
    """(seconds, resident bytes, working bytes) of every way to run a wave."""
    choices = [
        [(c, parked) for c in range(len(s.seconds)) for parked in (False, True)[: 1 + _parks(s)]]
        for s in stages
    ]
    for lanes, widths in _lane_layouts(len(stages), devices, node):
        for picks in itertools.product(*choices):
            seconds, resident, working = [0.0] * len(widths), [0.0] * len(widths), 0.0
            for s, lane, (c, parked) in zip(stages, lanes, picks, strict=True):
                width, tp = widths[lane], s.candidates.tp[c]
                if s.candidates.devices[c] > width or (len(widths) > 1 and width % tp):
                    break
                held, park = s.held_bytes[c], s.park_seconds
                seconds[lane] += s.seconds[c] + (park[c] if parked and park is not None else 0.0)
                resident[lane] += 0.0 if parked else held
                working = max(working, s.working_bytes[c] + (held if parked else 0.0))
            else:
                yield max(seconds), max(resident), working


def _parks(options: StageOptions) -> int:
    return options.park_seconds is not None


def _lane_layouts(
    count: int, devices: int, node: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """The lane of every model-stage, and the width of every lane."""
    cells = make_cells(devices, node, count)
    for lanes in itertools.product(range(count), repeat=count):
        used = sorted(set(lanes))
        if used == list(range(len(used))):
            for parts in itertools.product(range(1, cells.count + 1), repeat=len(used)):
                if sum(parts) == cells.count:
                    yield lanes, [cells.width(n) for n in parts]
