"""From a ConfigDict to a checked RunConfig, and from there to JSON."""

import dataclasses
import difflib
import hashlib
import json
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ml_collections import config_dict

from nereus_jax.config.checks import MODEL_STAGES, check_run
from nereus_jax.config.fields import (
    FieldType,
    default_of,
    field_types,
    listing,
    shown,
    unknown_key,
)
from nereus_jax.config.plan_entry import PlanEntry, canonical_model_stage, parse_plan_entry
from nereus_jax.config.schema import RunConfig
from nereus_jax.core.errors import ConfigError

ConfigLike = config_dict.ConfigDict | Mapping[str, Any]


def default_config() -> Any:
    """All keys with their defaults, for a configuration file to start from.

    Required keys are placeholders (None with a type). The result is locked, so that assigning an
    unknown key raises; only `plan`, `plan_changes` and `data.task_options` take new keys.

    Returns:
      A ConfigDict, typed Any so that a type checker accepts its keys as attributes.
    """
    config: Any = _defaults(RunConfig).lock()
    config.plan.unlock()
    config.plan_changes.unlock()
    config.data.task_options.unlock()
    return config


def _defaults(section: type) -> config_dict.ConfigDict:
    config = config_dict.ConfigDict()
    for name, kind in field_types(section).items():
        if kind.is_section:
            config[name] = _defaults(kind.base)
        elif kind.is_free:
            config[name] = config_dict.ConfigDict()
        elif kind.required:
            config[name] = config_dict.placeholder(kind.base)
        else:
            config[name] = default_of(section, name)
    return config


def parse_config(config: ConfigLike) -> RunConfig:
    """Checks a configuration and gives it types.

    Args:
      config: from `default_config` or with only some of its keys; a missing key has its default.

    Raises:
      ConfigError: an unknown key, a wrong type, a value that is not allowed, values that do not
        fit together, or a file that does not exist. The message is one line and names the key.
    """
    run = _parse_section(RunConfig, _as_mapping(config, "the configuration"), "")
    check_run(run)
    return run


def _as_mapping(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, config_dict.ConfigDict):
        # ConfigDict resolves references on access; an unset required one raises.
        resolved: dict[str, Any] = {}
        for key in value:
            try:
                resolved[key] = value[key]
            except config_dict.RequiredValueError:
                resolved[key] = None
        return resolved
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(f"{where}: expected a section (a ConfigDict), got {shown(value)}")


def _parse_section(section: type, given: Mapping[str, Any], prefix: str) -> Any:
    kinds = field_types(section)
    for name in given:
        if name not in kinds:
            raise ConfigError(unknown_key(RunConfig, section, prefix, str(name)))
    values: dict[str, Any] = {}
    for name, kind in kinds.items():
        key, value = prefix + name, given.get(name)
        if kind.is_section:
            inner = {} if value is None else _as_mapping(value, key)
            values[name] = _parse_section(kind.base, inner, key + ".")
        elif value is None:
            if kind.required:
                raise ConfigError(
                    f"{key} is not set; it has no default: set config.{key} to {kind.expected}"
                )
        elif key == "plan":
            values[name] = _parse_plan(_as_mapping(value, key))
        elif key == "plan_changes":
            values[name] = _parse_changes(_as_mapping(value, key))
        elif key == "data.task_options":
            values[name] = _parse_options(_as_mapping(value, key))
        else:
            values[name] = parse_value(key, value, kind)
    return section(**values)


def parse_value(key: str, value: object, kind: FieldType) -> Any:
    """Checks the type and the bounds of one value; an int serves as a float, a list as a tuple.

    Raises:
      ConfigError: see the message.
    """
    result: Any = value
    if kind.base is bool:
        ok = isinstance(value, bool)
    elif kind.base is int:
        ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        result = int(cast(int, value)) if ok else value
    elif kind.base is float:
        ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
        result = float(cast(float, value)) if ok else value
    elif kind.base is str:
        ok = isinstance(value, str)
    else:
        ok = isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)
        result = tuple(cast(list[str], value)) if ok else value
    if not ok:
        raise ConfigError(f"{key}: expected {kind.expected}, got {shown(value)}")
    if kind.choices and result not in kind.choices:
        close = difflib.get_close_matches(result, kind.choices, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{key}: expected {kind.expected}, got {shown(value)}{hint}")
    if kind.allowed is not None and not kind.allowed.contains(result):
        why = ""
        if key == "rollout.temperature" and result == 0:
            why = ": greedy rollouts do not explore (eval.temperature may be 0)"
        raise ConfigError(f"{key} must be {kind.expected}, got {shown(value)}{why}")
    return result


def _parse_changes(given: Mapping[Any, Any]) -> dict[int, dict[str, PlanEntry] | str]:
    changes: dict[int, dict[str, PlanEntry] | str] = {}
    for name, entries in given.items():
        text = str(name)
        if not text.isdecimal():
            raise ConfigError(
                f"plan_changes: a change is named by the step before which it happens, got "
                f"{text!r}; write config.plan_changes['10'] = {{'actor-TRAIN': 'dp=2,pp=1,tp=2'}}"
            )
        where = f"plan_changes.{text}"
        if int(text) in changes:
            raise ConfigError(
                f"plan_changes: step {int(text)} is given twice; put all entries of a step under "
                f"one key"
            )
        if isinstance(entries, str):
            changes[int(text)] = entries
        else:
            changes[int(text)] = _parse_plan(_as_mapping(entries, where), where)
    return changes


def _parse_plan(given: Mapping[str, Any], where: str = "plan") -> dict[str, PlanEntry]:
    plan: dict[str, PlanEntry] = {}
    for name, text in given.items():
        model_stage = canonical_model_stage(name)
        if model_stage not in MODEL_STAGES:
            close = difflib.get_close_matches(model_stage, MODEL_STAGES, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{where}: unknown model-stage {name!r}; {hint}Known model-stages: "
                f"{listing(MODEL_STAGES)}"
            )
        if model_stage in plan:
            raise ConfigError(
                f"{where}: {model_stage!r} is given in two spellings (with '-' and with '_'); "
                "keep one"
            )
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}.{model_stage}: expected a string such as 'dp=2,pp=1,tp=2', got "
                f"{shown(text)}"
            )
        plan[model_stage] = parse_plan_entry(text, model_stage, where)
    return plan


def _parse_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in given.items():
        items = value if isinstance(value, tuple | list) else (value,)
        if not all(isinstance(item, bool | int | float | str) for item in items):
            raise ConfigError(
                f"data.task_options.{name}: expected a bool, int, float, string or a tuple of "
                f"them, got {shown(value)}"
            )
        options[name] = tuple(value) if isinstance(value, list) else value
    return options


def config_to_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON values; `parse_config` reads it back to an equal RunConfig."""
    values = dataclasses.asdict(dataclasses.replace(config, plan={}, plan_changes={}))
    values["plan"] = {name: str(entry) for name, entry in config.plan.items()}
    values["plan_changes"] = {
        str(step): change
        if isinstance(change, str)
        else {name: str(entry) for name, entry in change.items()}
        for step, change in config.plan_changes.items()
    }
    return json.loads(json.dumps(values))


def fingerprint(config: RunConfig) -> str:
    """Identifies the model that a run trains, for a checkpoint directory to recognize its own.

    It covers the sizes (or, with `model.path`, the directory's name and its config.json), the type
    of the master weights and the tokenizer. Computation type, precision, longest sequence,
    algorithm, plan and the place of a directory leave it alone: they may change between a save and
    a resume.

    Returns:
      16 hexadecimal digits, the same on every machine.
    """
    model, tokenizer = config.model, config.tokenizer
    fields: dict[str, Any] = dataclasses.asdict(model)
    for name in ("path", "compute_dtype", "matmul_precision", "max_positions"):
        del fields[name]
    if not model.preset:
        del fields["preset"]  # the fingerprints from before there were presets stay what they are
    if model.path:
        root = Path(model.path).expanduser().resolve()
        settings = root / "config.json"
        digest = hashlib.sha256(settings.read_bytes()).hexdigest() if settings.is_file() else ""
        fields = {"directory": root.name, "settings": digest, "param_dtype": model.param_dtype}
    fields["tokenizer"] = [
        tokenizer.kind,
        Path(tokenizer.path).expanduser().resolve().name if tokenizer.path else "",
        tokenizer.characters,
    ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
