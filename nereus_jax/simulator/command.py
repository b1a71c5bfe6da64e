"""What `nereus simulate` does; it loads no jax."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereus_jax.config.simulation import SimulationConfig, load_simulation
from nereus_jax.control.settings import thresholds_of
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.roles import Role
from nereus_jax.core.workflow import ALGORITHMS, policy_gradient
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.length_traces import parse_shape, read_lengths
from nereus_jax.planning.search_problem import PlanProblem
from nereus_jax.planning.workload import LengthHistogram, Workload
from nereus_jax.simulator.compare import check_policies, compare
from nereus_jax.simulator.ledger import RunResult
from nereus_jax.simulator.recording import read_recording
from nereus_jax.simulator.replay import make_replay
from nereus_jax.simulator.run_files import write_runs, write_text
from nereus_jax.simulator.scenario import Scenario
from nereus_jax.simulator.setup import make_scenario
from nereus_jax.simulator.supply import Supply, constant_supply, read_supply
from nereus_jax.simulator.traces import (
    DriftTrace,
    drift_trace,
    synthetic_lengths,
    synthetic_supply,
)

SYNTHETIC_GAP_S = 600.0
"""From one change of a synthetic supply to the next, at least."""
FOREVER_S = 1e9


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `nereus simulate`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE[:ARG]", help="a file with get_config()")
    source.add_argument(
        "--from",
        dest="recording",
        type=Path,
        metavar="DIR",
        help="the directory of a live run with control.policy: what if it had another policy",
    )
    add = parser.add_argument
    add("--hardware", default="", metavar="NAME", help="with --from: where the run does not say")
    add(
        "--policy",
        default="all",
        metavar="NAME[,NAME]",
        help="static, dp_only, any_gain, every_k[=K], payback[=GAMMA], oracle, openrlhf_like, "
        "verl_like, dynarl_like, checkpoint_restart; all: the first six; default all",
    )
    add("--seeds", type=int, default=1, metavar="N", help="runs of each policy; default 1")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="write figures.json and, for every run, its decisions.jsonl and steps.jsonl",
    )


def run_simulate(
    arguments: argparse.Namespace,
    overrides: Sequence[str],
    model: Callable[[str], DecoderConfig],
) -> int:
    """Runs policies through a simulation, and prints how they compare.

    Args:
      arguments: as `add_simulate_arguments` has them.
      overrides: keys of the configuration, as texts.
      model: the sizes of a model by name.

    Raises:
      ConfigError: an argument, a key or a trace is not possible.
      InfeasiblePlanError: the first step fits no plan.
    """
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {arguments.seeds}")
    names = [p for p in arguments.policy.split(",") if p]
    if not names:
        raise ConfigError("--policy names no policy; write all, or names with commas")
    policies = check_policies(names)
    source = _source(arguments, overrides, model)
    seeds = range(source.first_seed, source.first_seed + arguments.seeds)
    done: list[RunResult] = []

    def progress(run: RunResult) -> None:
        done.append(run)
        print(
            f"seed {run.seed} {run.policy:18} {run.mean_step_s:8.1f} s/step (simulated)",
            file=sys.stderr,
        )

    print(source.text, end="")
    found = compare(source.make, policies, seeds, progress)
    print(found.table(), end="")
    figures = {**found.to_json(), **source.figures}
    text = json.dumps(figures, indent=1) + "\n"
    if arguments.json:
        write_text(arguments.json.expanduser(), text)
    if arguments.workdir:
        write_runs(arguments.workdir.expanduser(), text, done)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """What is simulated.

    Attributes:
      make: a scenario by seed.
      first_seed: the others follow.
      figures: what is written beside the figures of the policies.
      text: what is printed before them.
    """

    make: Callable[[int], Scenario]
    first_seed: int
    figures: Mapping[str, Any]
    text: str = ""


def _source(
    arguments: argparse.Namespace,
    overrides: Sequence[str],
    model: Callable[[str], DecoderConfig],
) -> _Source:
    if arguments.recording is None:
        if arguments.hardware:
            raise ConfigError("--hardware goes with --from; write --config.hardware=NAME")
        config = load_simulation(arguments.config, overrides)
        sizes = model(config.model)
        return _Source(
            make=lambda seed: scenario_of(config, sizes, seed),
            first_seed=config.seed,
            figures={"job": _job_json(config)},
        )
    if overrides:
        raise ConfigError(
            f"{overrides[0]} sets a key of --config; with --from the job is that of the run"
        )
    recording = read_recording(arguments.recording.expanduser())
    replay = make_replay(recording, model, arguments.hardware)
    return _Source(
        make=replay.scenario,
        first_seed=0,
        figures={"job": replay.job_json(), "recorded": replay.to_json()},
        text=replay.text(),
    )


def _job_json(config: SimulationConfig) -> dict[str, str | int]:
    """What was simulated, for the reader of the figures."""
    hardware = load_hardware(config.hardware)
    return {
        "model": config.model,
        "algorithm": config.algorithm,
        "hardware": hardware.name,
        "devices": config.nodes * hardware.devices_per_node,
        "device_memory_bytes": hardware.memory_bytes,
        "steps": config.steps,
        "prompts": config.prompts,
        "supply": config.supply,
        "lengths": config.lengths,
    }


def scenario_of(config: SimulationConfig, model: DecoderConfig, seed: int) -> Scenario:
    """The job, its cluster and its trace.

    Raises:
      ConfigError: a trace cannot be read, or does not fit.
    """
    scenario = make_scenario(
        problem_of(config, model),
        trace_of(config, seed),
        config.nodes,
        seed,
        checkpoint_every=config.checkpoint_every,
    )
    return dataclasses.replace(scenario, thresholds=thresholds_of(config), doubt=config.doubt)


def problem_of(config: SimulationConfig, model: DecoderConfig) -> PlanProblem:
    """The job."""
    if ALGORITHMS[config.algorithm].grouped and config.samples < 2:
        raise ConfigError(
            f"samples must be at least 2 for {config.algorithm}, whose baseline is the other "
            f"responses to a prompt; got {config.samples}"
        )
    hardware = load_hardware(config.hardware)
    if "bfloat16" not in hardware.peak_flops_per_s:
        raise ConfigError(f"hardware {hardware.name} has no peak for bfloat16; use another kind")
    return PlanProblem(
        workflow=policy_gradient(
            config.algorithm,
            reward_model=config.reward_model,
            reference=True,
            recompute_old_logprobs=True,
        ),
        models=dict.fromkeys(Role, model),
        workload=Workload(
            prompts=config.prompts,
            samples_per_prompt=config.samples,
            prompt_lengths=LengthHistogram.constant(config.prompt_tokens),
            response_lengths=LengthHistogram.constant(config.max_response_tokens),
            max_response_tokens=config.max_response_tokens,
            minibatch_size=config.minibatch_size,
            epochs=config.epochs,
        ),
        hardware=hardware,
        num_devices=config.nodes * hardware.devices_per_node,
    )


def trace_of(config: SimulationConfig, seed: int) -> DriftTrace:
    """What the run goes through; synthetic parts are drawn by the seed."""
    if config.lengths == "synthetic":
        lengths = synthetic_lengths(
            seed,
            start_tokens=config.synthetic_start_tokens,
            end_tokens=config.synthetic_end_tokens,
            steps=config.steps,
        )
    else:
        lengths = read_lengths(Path(config.lengths).expanduser())
        stop = config.lengths_stop or lengths.steps[-1]
        lengths = lengths.cut(max(config.lengths_start, lengths.steps[0]), stop)
    return drift_trace(
        _supply(config, seed),
        lengths.scaled(config.lengths_scale),
        parse_shape(config.tail),
        steps=config.steps,
        seconds_per_step=config.seconds_per_step,
        notice_s=config.notice_s,
    )


def _supply(config: SimulationConfig, seed: int) -> Supply:
    if config.supply == "all":
        return constant_supply(config.nodes, FOREVER_S)
    if config.supply == "synthetic":
        return synthetic_supply(
            seed,
            config.nodes,
            gap_s=2.0 * config.seconds_per_step or SYNTHETIC_GAP_S,
            least=min(max(config.supply_least_nodes, 1), config.nodes),
        )
    supply = read_supply(Path(config.supply).expanduser())
    wanted = config.supply_start_s + config.steps * config.seconds_per_step
    stop = config.supply_stop_s or min(max(wanted, config.supply_start_s + 1.0), supply.end_s)
    supply = supply.cut(config.supply_start_s, stop if config.seconds_per_step else supply.end_s)
    if config.supply_scale:
        supply = supply.scaled(config.nodes)
    return supply.at_least(config.supply_least_nodes)
