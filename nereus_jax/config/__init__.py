"""The run configuration: a ConfigDict becomes typed, checked, frozen dataclasses; no jax."""

from nereus_jax.config.checks import MODEL_STAGES, plans_by_step, resolve_plan
from nereus_jax.config.data_files import find_data_files
from nereus_jax.config.fit import fit_plans
from nereus_jax.config.load import load_config_file
from nereus_jax.config.parse import config_to_json, default_config, fingerprint, parse_config
from nereus_jax.config.plan_entry import (
    PlanEntry,
    check_plan_against_devices,
    check_plan_against_model,
    parse_plan_entry,
)
from nereus_jax.config.plan_files import fit_plan_files, plan_keys, read_plan_file
from nereus_jax.config.schema import (
    AlgorithmConfig,
    CalibrationConfig,
    CheckpointConfig,
    ControlConfig,
    DataConfig,
    EvalConfig,
    KLConfig,
    ModelConfig,
    OptimizerConfig,
    ReportConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScoreConfig,
    TokenizerConfig,
    TrainConfig,
    TransitionConfig,
    WarmupConfig,
)

__all__ = [
    "MODEL_STAGES",
    "AlgorithmConfig",
    "CalibrationConfig",
    "CheckpointConfig",
    "ControlConfig",
    "DataConfig",
    "EvalConfig",
    "KLConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlanEntry",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ScoreConfig",
    "TokenizerConfig",
    "TrainConfig",
    "TransitionConfig",
    "WarmupConfig",
    "check_plan_against_devices",
    "check_plan_against_model",
    "config_to_json",
    "default_config",
    "find_data_files",
    "fingerprint",
    "fit_plan_files",
    "fit_plans",
    "load_config_file",
    "parse_config",
    "parse_plan_entry",
    "plan_keys",
    "plans_by_step",
    "read_plan_file",
    "resolve_plan",
]
