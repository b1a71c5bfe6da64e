"""Every key of a simulation: its type, default, unit and allowed values; how it is read.

The text under a field documents it, as in `schema`.
"""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ml_collections import config_dict

from nereus_jax.config.constraints import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SeedInt,
)
from nereus_jax.config.fields import default_of, field_types, shown, unknown_key
from nereus_jax.config.load import run_config_file
from nereus_jax.config.parse import parse_value
from nereus_jax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """A job, a cluster and what they go through."""

    model: str = "llama3-8b"
    """A preset, or a directory or config.json of Hugging Face; all roles have its sizes."""
    algorithm: Literal["ppo", "grpo", "rloo", "reinforce_pp", "remax"] = "ppo"
    """The algorithm."""
    reward_model: bool = True
    """Rewards come from a model of the same sizes, not from a function."""
    prompts: PositiveInt = 512
    """Prompts of a step."""
    samples: PositiveInt = 1
    """Responses to each."""
    prompt_tokens: PositiveInt = 512
    """Of every prompt."""
    max_response_tokens: PositiveInt = 8192
    """Where responses are cut."""
    minibatch_size: PositiveInt = 128
    """Rows of an optimizer's update; divides the rows of a step."""
    epochs: PositiveInt = 1
    """Passes of training over the rows."""
    hardware: str = "a100-80gb"
    """A name such as h100, or a .json file."""
    nodes: PositiveInt = 4
    """Of the cluster."""
    steps: PositiveInt = 50
    """Of the run."""
    seed: SeedInt = 0
    """Of the first run; the others of `--seeds` follow."""
    checkpoint_every: PositiveInt = 10
    """Steps from one checkpoint to the next."""
    length_threshold: PositiveFloat = 0.30
    """As a run's `control.length_threshold`; the next three as those there."""
    memory_threshold: PositiveFloat = 0.15
    """Of the largest measured memory of a device."""
    efficiency_threshold: PositiveFloat = 0.25
    """Of what an operation class reaches of its peak."""
    doubt: NonNegativeFloat = 1.0
    """Of what prices are off by, that payback asks of a gain."""

    supply: str = "all"
    """Nodes over time: a trace file, `synthetic`, or `all`: nothing changes."""
    supply_start_s: NonNegativeFloat = 0.0
    """Start of the window of the trace that is played."""
    supply_stop_s: NonNegativeFloat = 0.0
    """Its end; 0: that of the trace, or where the run ends."""
    supply_scale: bool = True
    """The most nodes that the window has become `nodes`, the others in proportion."""
    supply_least_nodes: NonNegativeInt = 1
    """That stay, whatever the trace has."""
    seconds_per_step: NonNegativeFloat = 300.0
    """Of the trace, that become one step; 0: its seconds are those of the run."""
    notice_s: NonNegativeFloat = 0.0
    """From a node's revocation to its loss; 0: without warning."""

    lengths: str = "synthetic"
    """Mean response lengths over steps: a file, or `synthetic`."""
    lengths_start: NonNegativeFloat = 0.0
    """First step of the file that is played."""
    lengths_stop: NonNegativeFloat = 0.0
    """The last one; 0: that of the file."""
    lengths_scale: PositiveFloat = 1.0
    """That lengths are multiplied with."""
    synthetic_start_tokens: PositiveFloat = 500.0
    """Of a synthetic curve."""
    synthetic_end_tokens: PositiveFloat = 4000.0
    """Of a synthetic curve."""
    tail: str = "lognormal=1.0"
    """The lengths of a batch around its mean: a histogram's file, or `lognormal=SIGMA`."""


def default_simulation() -> Any:
    """All keys with their defaults, for a configuration file to start from; locked.

    Returns:
      A ConfigDict, typed Any so that a type checker accepts its keys as attributes.
    """
    names = field_types(SimulationConfig)
    return config_dict.ConfigDict({n: default_of(SimulationConfig, n) for n in names}).lock()


def load_simulation(path: str, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Runs `get_config` of a file, applies overrides and checks the result.

    Args:
      path: 'FILE' or 'FILE:ARG', as `load_config_file` takes it.
      overrides: `--config.key=value` texts.

    Raises:
      ConfigError: the file fails, or a key or value is not allowed; the message names it.
    """
    config = run_config_file(path)
    values: dict[str, Any] = {key: config[key] for key in config}
    for text in overrides:
        key, equals, value = text.removeprefix("--config.").partition("=")
        if not text.startswith("--config.") or not equals:
            raise ConfigError(f"override {text!r} is not understood; write --config.key=VALUE")
        if key not in field_types(SimulationConfig):
            raise ConfigError("override: " + _unknown(key))
        values[key] = _literal(key, value)
    return parse_simulation(values)


def _literal(key: str, text: str) -> Any:
    """What a text stands for, given the type of its key."""
    kind = field_types(SimulationConfig)[key]
    if kind.base is str:
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # parse_value says what is expected in its place


def _unknown(key: str) -> str:
    return unknown_key(SimulationConfig, SimulationConfig, "", key)


def parse_simulation(values: Mapping[str, Any]) -> SimulationConfig:
    """Checks a configuration and gives it types.

    Raises:
      ConfigError: a key is not known, or a value is not allowed.
    """
    kinds = field_types(SimulationConfig)
    for key in values:
        if key not in kinds:
            raise ConfigError(_unknown(str(key)))
    config = SimulationConfig(**{k: parse_value(k, v, kinds[k]) for k, v in values.items()})
    rows = config.prompts * config.samples
    if rows % config.minibatch_size:
        raise ConfigError(
            f"minibatch_size must divide the {rows} rows of a step, got "
            f"{shown(config.minibatch_size)}; use one of their divisors"
        )
    for name in ("supply", "lengths"):
        start, stop = ("start_s", "stop_s") if name == "supply" else ("start", "stop")
        low, high = getattr(config, f"{name}_{start}"), getattr(config, f"{name}_{stop}")
        if high and high <= low:
            raise ConfigError(
                f"{name}_{stop} must be above {name}_{start} {low:g} or 0, got {high:g}"
            )
    return config
