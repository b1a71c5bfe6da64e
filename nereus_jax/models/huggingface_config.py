"""config.json and generation_config.json of a Hugging Face directory: read into `DecoderConfig`,
and written from it.

A family says which leaves its models have beside Llama's, and what transformers takes for a field
that config.json leaves out. Whatever would change what a model computes and is not done here is
refused by name.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nereus_jax.core.architectures import DecoderConfig, Head, LinearRope, Llama3Rope
from nereus_jax.core.errors import ConfigError, DataError

_HEAD_CLASSES: Mapping[Head, str] = {
    Head.LM: "ForCausalLM",
    Head.SCALAR: "ForSequenceClassification",
}
_INT_FIELDS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
# Field -> values that mean that the feature is not used, the default first.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
_NO_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False, None)}
_NO_WINDOW: Mapping[str, tuple[object, ...]] = {"use_sliding_window": (False, None)}
_GENERATION_CONFIG = "generation_config.json"
# Field of Llama3Rope -> of config.json.
_LLAMA3_FIELDS: Mapping[str, str] = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of one `model_type` share.

    Attributes:
      model_type: in config.json.
      name: what their architectures' names begin with.
      leaves: the switches of `DecoderConfig` for the leaves that Llama does not have.
      defaults: fields of config.json -> what transformers takes where they are left out.
      unsupported: field -> values that mean that the feature is not used, the default first.
    """

    model_type: str
    name: str
    leaves: Mapping[str, bool]
    defaults: Mapping[str, int]
    unsupported: Mapping[str, tuple[object, ...]]

    def architecture(self, head: Head) -> str:
        """The name in config.json of a model with this head."""
        return self.name + _HEAD_CLASSES[head]


FAMILIES = (
    Family(
        model_type="llama",
        name="Llama",
        leaves={"qkv_bias": False, "qk_norm": False},
        defaults={},
        unsupported={**_NO_BIAS, "sliding_window": (None,)},
    ),
    Family(
        model_type="qwen2",
        name="Qwen2",
        leaves={"qkv_bias": True, "qk_norm": False},
        defaults={"num_key_value_heads": 32},
        unsupported=_NO_WINDOW,
    ),
    Family(
        model_type="qwen3",
        name="Qwen3",
        leaves={"qkv_bias": False, "qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        unsupported={**_NO_BIAS, **_NO_WINDOW},
    ),
)
ARCHITECTURES: Mapping[str, tuple[Family, Head]] = {
    family.architecture(head): (family, head) for head in _HEAD_CLASSES for family in FAMILIES
}


def read_config(directory: str | pathlib.Path) -> DecoderConfig:
    """The sizes in config.json.

    Raises:
      DataError: the file is missing or malformed, the architecture or a feature is not supported,
        or a field is missing or not usable.
    """
    return read_checkpoint_config(pathlib.Path(directory) / "config.json")[0]


def read_eos_ids(directory: str | pathlib.Path) -> tuple[int, ...]:
    """The tokens that end a text: those of generation_config.json, else those of config.json.

    Returns:
      Empty where neither names one.

    Raises:
      DataError: a file is malformed, or an id is no token of the model.
    """
    config_path = pathlib.Path(directory) / "config.json"
    generation_path = pathlib.Path(directory) / _GENERATION_CONFIG
    config = read_json(config_path)
    for path in (generation_path, config_path):
        content = read_json(path) if path.is_file() else {}
        value = content.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            _check_token_id(path, token_id, _int_field(config_path, config, "vocab_size"))
        if ids:
            return tuple(ids)
    return ()


def _check_token_id(path: pathlib.Path, token_id: object, vocab_size: int) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        raise DataError(f"{path}: eos_token_id must be an id or a list of ids, got {token_id!r}")
    if not 0 <= token_id < vocab_size:
        raise DataError(
            f"{path}: eos_token_id {token_id} is no token of the model, ids are below {vocab_size}"
        )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; a DataError where there is none."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give a directory in the Hugging Face format")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_checkpoint_config(path: pathlib.Path) -> tuple[DecoderConfig, Head, Family]:
    """The configuration, the head and the family."""
    content = read_json(path)
    given = content.get("architectures")
    names: list[Any] = given if isinstance(given, list) and given else [given or "(none)"]
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise DataError(
            f"{path}: architecture {', '.join(map(str, names))} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    family, head = ARCHITECTURES[names[0]]
    _check_features(path, content, family)
    try:
        return _decoder_config(path, {**family.defaults, **content}, family), head, family
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _check_features(path: pathlib.Path, content: Mapping[str, Any], family: Family) -> None:
    for field, allowed in {**_UNSUPPORTED, **family.unsupported}.items():
        if content.get(field, allowed[0]) not in allowed:
            raise DataError(
                f"{path}: {field} = {content[field]!r} is not supported; supported: {allowed[0]!r}"
            )
    kinds = content.get("layer_types") or []
    if not isinstance(kinds, list) or set(kinds) - {"full_attention"}:
        raise DataError(
            f"{path}: layer_types = {kinds!r} is not supported; supported: 'full_attention' in "
            "every layer"
        )


def _decoder_config(
    path: pathlib.Path, content: Mapping[str, Any], family: Family
) -> DecoderConfig:
    sizes = {ours: _int_field(path, content, theirs) for ours, theirs in _INT_FIELDS.items()}
    num_heads, embed_dim = sizes["num_heads"], sizes["embed_dim"]
    derived = {"num_key_value_heads": num_heads, "head_dim": embed_dim // num_heads}
    filled = {**content, **{k: v for k, v in derived.items() if content.get(k) is None}}
    theta, scaling = _rope(path, content)
    return DecoderConfig(
        **sizes,
        **family.leaves,
        num_kv_heads=_int_field(path, filled, "num_key_value_heads"),
        head_dim=_int_field(path, filled, "head_dim"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(path, "rms_norm_eps", _required(path, content, "rms_norm_eps")),
        tie_embeddings=content.get("tie_word_embeddings") is True,
    )


def _rope(
    path: pathlib.Path, content: Mapping[str, Any]
) -> tuple[float, LinearRope | Llama3Rope | None]:
    """rope_theta and the scaling: in rope_scaling, or (transformers 5) in rope_parameters.

    Llama 1 has no theta: 10,000.
    """
    field = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    parameters = content.get(field) or {}
    if not isinstance(parameters, dict):
        raise DataError(f"{path}: {field} must be an object, got {parameters!r}")
    nested = [name for name, value in parameters.items() if isinstance(value, dict)]
    if nested or parameters.get("partial_rotary_factor", 1) not in (1, None):
        wrong = nested[0] if nested else "partial_rotary_factor"
        raise DataError(
            f"{path}: {wrong} in {field} is not supported; supported: one set of frequencies for "
            "all layers and whole heads"
        )
    theta = parameters.get("rope_theta", content.get("rope_theta", 10_000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return _number(path, "rope_theta", theta), _scaling(path, field, kind, parameters, content)


def _scaling(
    path: pathlib.Path,
    field: str,
    kind: object,
    parameters: Mapping[str, Any],
    content: Mapping[str, Any],
) -> LinearRope | Llama3Rope | None:
    if kind == "default":
        return None

    def number(name: str) -> float:
        if parameters.get(name) is None:
            raise DataError(f"{path}: {field} of type {kind!r} lacks the field {name}")
        return _number(path, f"{name} of {field}", parameters[name])

    if kind == "linear":
        return LinearRope(factor=number("factor"))
    if kind != "llama3":
        raise DataError(
            f"{path}: {field} of type {kind!r} is not supported; supported: 'default', 'linear', "
            "'llama3'"
        )
    # The places and their order are those of transformers 5.
    original, longest = "original_max_position_embeddings", "max_position_embeddings"
    length = content.get(original) or parameters.get(original) or content.get(longest)
    return Llama3Rope(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_positions=_int_field(path, {original: length}, original),
    )


def _required(path: pathlib.Path, content: Mapping[str, Any], field: str) -> Any:
    if content.get(field) is None:
        raise DataError(f"{path} lacks the field {field}")
    return content[field]


def _int_field(path: pathlib.Path, content: Mapping[str, Any], field: str) -> int:
    value = _required(path, content, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{path}: {field} must be a positive int, got {value!r}")
    return value


def _number(path: pathlib.Path, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{path}: {field} must be a number, got {value!r}")
    return float(value)


def family_of(config: DecoderConfig) -> Family:
    """The family whose models have the leaves of this one.

    Raises:
      ConfigError: no family has.
    """
    for family in FAMILIES:
        if all(getattr(config, name) is value for name, value in family.leaves.items()):
            return family
    raise ConfigError(
        f"no Hugging Face architecture has qkv_bias = {config.qkv_bias} and qk_norm = "
        f"{config.qk_norm}; export a model of {', '.join(f.name for f in FAMILIES)}"
    )


def config_json(config: DecoderConfig, head: Head, dtype: str) -> dict[str, Any]:
    """config.json; rope and dtype are written where transformers 4 and where 5 look."""
    family, ours = family_of(config), dataclasses.asdict(config)
    scaling = _scaling_json(config.rope_scaling)
    content = {
        "architectures": [family.architecture(head)],
        "model_type": family.model_type,
        **{theirs: ours[our] for our, theirs in _INT_FIELDS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            **(scaling or {}),
        },
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if family.model_type == "llama":
        content |= {"attention_bias": False, "mlp_bias": False}
    else:
        content |= {"use_sliding_window": False}
    return content | ({"id2label": {"0": "LABEL_0"}} if head is Head.SCALAR else {})


def _scaling_json(scaling: LinearRope | Llama3Rope | None) -> dict[str, Any] | None:
    """rope_scaling as transformers 4 has it; None where it has null."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearRope):
        return {"rope_type": "linear", "factor": scaling.factor}
    fields = {theirs: getattr(scaling, ours) for ours, theirs in _LLAMA3_FIELDS.items()}
    return {"rope_type": "llama3", **fields}
