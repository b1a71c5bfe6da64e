"""Checks between the fields of a run configuration, and its plan; no device needed."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from nereus_jax.config.data_files import find_data_files
from nereus_jax.config.plan_entry import PlanEntry, check_plan_against_model
from nereus_jax.config.plan_files import check_plan_files
from nereus_jax.config.schema import RunConfig
from nereus_jax.core.errors import ConfigError
from nereus_jax.core.layout import divisors
from nereus_jax.core.presets import preset
from nereus_jax.core.workflow import ALGORITHMS

MODEL_STAGES = (
    "actor-TRAIN",
    "critic-TRAIN",
    "actor-GENERATE",
    "actor-SCORE",
    "reference-SCORE",
    "critic-SCORE",
    "reward-SCORE",
)
"""The model-stages that a plan may name; reward-SCORE exists only with a reward model. TRAIN comes
first so that a mistake in an entry is shown under its own name, not under one that falls back."""

_FALLBACK = {
    "actor-GENERATE": "actor-TRAIN",
    "actor-SCORE": "actor-TRAIN",
    "reference-SCORE": "actor-TRAIN",
    "critic-SCORE": "critic-TRAIN",
}
_SIZES = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")


def resolve_plan(config: RunConfig) -> dict[str, PlanEntry]:
    """The layout of every model-stage of the run.

    actor-GENERATE, actor-SCORE and reference-SCORE fall back to actor-TRAIN, critic-SCORE to
    critic-TRAIN, with the devices of that entry, but are not parked because it is. An algorithm
    without a critic has no critic-*.

    Raises:
      ConfigError: an entry without a fallback is missing.
    """
    plan: dict[str, PlanEntry] = {}
    for name in MODEL_STAGES:
        if name == "reward-SCORE" and not config.reward.model_path:
            continue
        if name.startswith("critic-") and not ALGORITHMS[config.algorithm.name].critic:
            continue
        entry = config.plan.get(name)
        if entry is None and _FALLBACK.get(name) in config.plan:
            entry = dataclasses.replace(config.plan[_FALLBACK[name]], parked=False)
        if entry is None:
            missing = _FALLBACK.get(name, name)
            raise ConfigError(
                f"plan: {missing!r} is missing, got entries for {list(config.plan) or 'nothing'}; "
                f"set config.plan['{missing}'] = 'dp=1,pp=1,tp=1' (or larger degrees), or plan_file"
            )
        plan[name] = entry
    return plan


def plans_by_step(config: RunConfig) -> dict[int, dict[str, PlanEntry]]:
    """The whole plan from each planned change on, by the step before which it happens.

    A change replaces the entries that it names; what falls back follows its TRAIN entry. Changes to
    plan files are left out.
    """
    plans: dict[int, dict[str, PlanEntry]] = {}
    given = dict(config.plan)
    for step in sorted(config.plan_changes):
        change = config.plan_changes[step]
        if isinstance(change, str):
            continue
        given |= change
        plans[step] = resolve_plan(dataclasses.replace(config, plan=dict(given)))
    return plans


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _nearest(numbers: Iterable[int], wanted: int) -> str:
    """The nearest smaller and the nearest larger number, in words; '' when there is neither."""
    candidates = set(numbers) - {wanted}
    below = [n for n in candidates if n < wanted]
    above = [n for n in candidates if n > wanted]
    return " or ".join(
        str(n) for n in ([max(below)] if below else []) + ([min(above)] if above else [])
    )


def _check_model(config: RunConfig) -> None:
    model = config.model
    if model.path:
        _check_path("model.path", model.path, Path.is_dir, "directory with config.json and weights")
        return
    if model.preset:
        preset(model.preset)
        return
    missing = [name for name in _SIZES if getattr(model, name) == 0]
    _require(
        not missing,
        f"model: neither 'path' nor all sizes are given, missing {', '.join(missing)}; set "
        f"config.model.path to a Hugging Face directory, or config.model.{(missing or _SIZES)[0]} "
        "and the like to the sizes of a random model",
    )
    _require(
        model.num_heads % model.num_kv_heads == 0,
        f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads="
        f"{model.num_heads}; allowed: {', '.join(map(str, divisors(model.num_heads)))}",
    )
    _require(
        model.head_dim % 2 == 0,
        f"model.head_dim must be even (rotary positions turn pairs), got {model.head_dim}; "
        f"such as {model.head_dim + 1}",
    )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    _require(
        longest <= model.max_positions,
        f"data.max_prompt_length={config.data.max_prompt_length} + rollout.max_response_length="
        f"{config.rollout.max_response_length} = {longest} tokens exceed model.max_positions="
        f"{model.max_positions}; raise max_positions or shorten prompts or responses",
    )


def _check_path(key: str, text: str, exists: Callable[[Path], bool], what: str) -> None:
    path = Path(text).expanduser()
    if exists(path):
        return
    wrong = "exists but is not such a thing" if path.exists() else "does not exist"
    raise ConfigError(
        f"{key}: expected a {what}, got {text!r}, which {wrong} (looked for "
        f"{str(path.absolute())!r}); set config.{key} to an existing one"
    )


def _check_data(config: RunConfig) -> None:
    for key, value in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        form = "'path/to/file.jsonl' (or .parquet) or 'task:NAME'"
        _require(bool(value), f"{key} is empty; set config.{key} to {form}")
        if value.startswith("task:"):
            name = value.removeprefix("task:")
            _require(bool(name.strip()), f"{key}={value!r} names no task; write {form}")
        else:
            find_data_files(key, value)
    for part in config.data.prompt_field.split("+"):
        _require(
            bool(part.strip()),
            f"data.prompt_field={config.data.prompt_field!r} names no field; write 'prompt', or "
            "'first+second' to join two",
        )
    _require(
        bool(config.data.answer_field)
        or not config.warmup.num_steps
        or config.data.train.startswith("task:"),
        "warmup.num_steps > 0 trains on the answers, but data.answer_field is ''; name the field "
        "with the answers, or set config.warmup.num_steps = 0",
    )
    tokenizer = config.tokenizer
    if tokenizer.kind == "huggingface":
        _require(
            bool(tokenizer.path or config.model.path),
            "tokenizer.kind='huggingface' needs a directory, got empty tokenizer.path and "
            "model.path; set config.tokenizer.path",
        )
        if tokenizer.path:
            _check_path("tokenizer.path", tokenizer.path, Path.is_dir, "tokenizer directory")


def _check_reward(config: RunConfig) -> None:
    reward = config.reward
    _require(
        bool(reward.function) != bool(reward.model_path),
        f"reward: exactly one of 'function' and 'model_path' must be given, got "
        f"{reward.function!r} and {reward.model_path!r}; set config.reward.function = "
        "'package.module.function' or config.reward.model_path to a reward model directory",
    )
    if reward.model_path:
        _check_path("reward.model_path", reward.model_path, Path.is_dir, "reward model directory")
    else:
        parts = reward.function.split(".")
        _require(
            len(parts) > 1 and all(part.isidentifier() for part in parts),
            f"reward.function must be a dotted name such as 'package.module.function', got "
            f"{reward.function!r}",
        )
    _require(
        bool(reward.model_path) or "reward-SCORE" not in config.plan,
        "plan.reward-SCORE is given, but the run has no reward model (reward.model_path is empty); "
        "drop the entry or set config.reward.model_path",
    )


def _check_rollout(config: RunConfig) -> None:
    rollout = config.rollout
    _require(
        "" not in rollout.stop,
        f"rollout.stop holds an empty string, got {rollout.stop!r}; an empty string ends every "
        "response at once: drop it",
    )
    _check_kv_cache(config)
    _check_room(config)
    if rollout.length_trace:
        _require(
            rollout.source == "live",
            "rollout.length_trace is for responses that are generated, got "
            "rollout.source='recorded', whose lengths are recorded too; drop one of them",
        )
    if rollout.source == "recorded":
        _require(
            bool(rollout.recorded_dir),
            "rollout.source='recorded' needs rollout.recorded_dir, got ''; set "
            "config.rollout.recorded_dir to a directory of recorded rollouts",
        )
        _check_path("rollout.recorded_dir", rollout.recorded_dir, Path.is_dir, "rollout directory")
        _require(
            not rollout.record,
            "rollout.record=True with rollout.source='recorded' would record the recording; set "
            "one of config.rollout.record = False and config.rollout.source = 'live'",
        )


def _check_room(config: RunConfig) -> None:
    room, most = config.rollout.first_room, config.rollout.max_response_length
    _require(
        room <= most,
        f"rollout.first_room={room} is more than rollout.max_response_length={most}; set it to at "
        f"most that, or to 0 for all room at once",
    )


def _check_kv_cache(config: RunConfig) -> None:
    """Checks that one row always fits: rows that make way for each other would never end."""
    rollout, page = config.rollout, config.rollout.kv_page_tokens
    prompt, response = config.data.max_prompt_length, rollout.max_response_length
    needed = -(-(prompt + response) // page) * page
    _require(
        rollout.kv_cache_tokens == 0 or rollout.kv_cache_tokens >= needed,
        f"rollout.kv_cache_tokens={rollout.kv_cache_tokens} does not hold one row of "
        f"data.max_prompt_length={prompt} + rollout.max_response_length={response} tokens in pages "
        f"of rollout.kv_page_tokens={page}; set it to at least {needed}, or to 0 for a cache with "
        "room for the maximum of every row",
    )


def _check_algorithm(config: RunConfig) -> None:
    minibatch, rollout = config.algorithm.minibatch_size, config.rollout
    rows, many = rollout.num_rows, rollout.samples_per_prompt
    shown = f"rollout.batch_size={rollout.batch_size}"
    shown += f" * rollout.samples_per_prompt={many} = {rows}" if many > 1 else ""
    _require(
        rows % minibatch == 0,
        f"algorithm.minibatch_size={minibatch} does not divide {shown}; nearest that do: "
        f"{_nearest(divisors(rows), minibatch)}",
    )
    name = config.algorithm.name
    _require(
        many > 1 or not ALGORITHMS[name].grouped,
        f"algorithm.name={name!r} compares the responses to a prompt, got "
        f"rollout.samples_per_prompt={many}; set it to at least 2",
    )
    _require(
        ALGORITHMS[name].critic or not any(k.startswith("critic-") for k in config.plan),
        f"plan.{next((k for k in config.plan if k.startswith('critic-')), '')} is given, but "
        f"algorithm.name={name!r} has no critic; drop the entry",
    )
    _require(
        not (ALGORITHMS[name].greedy_baseline and rollout.source == "recorded"),
        f"algorithm.name={name!r} generates a greedy response to every prompt, which a recording "
        f"does not hold; set config.rollout.source = 'live'",
    )
    kl = config.algorithm.kl
    _require(
        kl.controller == "fixed" or kl.coef > 0,
        "algorithm.kl.coef must be > 0 with algorithm.kl.controller='adaptive', got 0: the "
        "controller multiplies it and it would stay 0; set a coef or controller='fixed'",
    )
    _require(
        not (kl.place == "loss" and kl.estimator == "k1"),
        "algorithm.kl.estimator='k1' has no mean gradient with algorithm.kl.place='loss'; use "
        "estimator 'k2' or 'k3', or place='reward'",
    )


def _check_replicas(config: RunConfig, where: str, entry: PlanEntry) -> None:
    """Checks that every replica has rows; how many each has is the packing's matter."""
    minibatch = config.algorithm.minibatch_size
    _require(
        entry.dp <= minibatch,
        f"{where}: dp={entry.dp} replicas, but a minibatch has algorithm.minibatch_size="
        f"{minibatch} rows; use at most dp={minibatch}",
    )


def _check_plan(config: RunConfig) -> None:
    first = [] if config.plan_file else [(0, resolve_plan(config))]
    for step, plan in [*first, *plans_by_step(config).items()]:
        where = "plan" if step == 0 else f"plan_changes.{step}"
        for name, entry in plan.items():
            if name.endswith("-TRAIN"):
                _check_replicas(config, f"{where}.{name}", entry)
        if not config.model.path:
            own = {name: entry for name, entry in plan.items() if name != "reward-SCORE"}
            sizes = preset(config.model.preset) if config.model.preset else config.model
            check_plan_against_model(own, sizes.num_heads, sizes.num_layers, where)


def _check_plan_changes(config: RunConfig) -> None:
    for step in config.plan_changes:
        _require(
            0 < step < config.num_steps,
            f"plan_changes.{step}: the run has the step boundaries 1 to {config.num_steps - 1}; "
            f"change the plan at one of them",
        )


def _check_calibration(config: RunConfig) -> None:
    calibration = config.calibration
    _require(
        not (calibration.file and calibration.mode == "off"),
        f"calibration.file={calibration.file!r} is given, but calibration.mode='off'; drop one of "
        f"the two",
    )


def _check_control(config: RunConfig) -> None:
    control = config.control
    for name in ("pool_trace", "pool_file", "pool_hook"):
        _require(
            not getattr(control, name) or bool(control.policy),
            f"control.{name} is given, but no control.policy that takes notice of it; set one, "
            f"such as control.policy=payback",
        )
    _require(
        not control.pool_hook_token_file or bool(control.pool_hook),
        "control.pool_hook_token_file is given, but no control.pool_hook; set one, such as "
        "control.pool_hook=127.0.0.1:8642",
    )
    _require(
        not (control.policy and config.plan_changes),
        f"control.policy={control.policy!r} changes the plan by itself, and plan_changes names "
        f"changes too; drop one of the two",
    )


def check_run(config: RunConfig) -> None:
    """Checks what no single field shows.

    Raises:
      ConfigError: the first mistake found.
    """
    for check in (_check_model, _check_data, _check_reward, _check_rollout, _check_algorithm):
        check(config)
    _check_calibration(config)
    _check_control(config)
    _check_plan_changes(config)
    check_plan_files(config)
    _check_plan(config)
