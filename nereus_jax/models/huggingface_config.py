"""config.json of a Hugging Face directory: read into `DecoderConfig`, and written from it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.errors import DataError

ARCHITECTURES: Mapping[str, Head] = {
    "LlamaForCausalLM": Head.LM,
    "LlamaForSequenceClassification": Head.SCALAR,
}

# Field -> values that mean that the feature is not used, the default first.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "rope_scaling": (None, {}),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
_INT_FIELDS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}


def read_config(directory: str | pathlib.Path) -> DecoderConfig:
    """The sizes in config.json.

    Raises:
      DataError: the file is missing or malformed, the architecture or a feature is not supported,
        or a field is missing or not usable.
    """
    return read_checkpoint_config(pathlib.Path(directory) / "config.json")[0]


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


def read_checkpoint_config(path: pathlib.Path) -> tuple[DecoderConfig, Head, str]:
    """The configuration, the head and the name of the architecture."""
    content = read_json(path)
    given = content.get("architectures")
    names: list[Any] = given if isinstance(given, list) and given else [given or "(none)"]
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise DataError(
            f"{path}: architecture {', '.join(map(str, names))} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    for field, allowed in _UNSUPPORTED.items():
        if content.get(field, allowed[0]) not in allowed:
            raise DataError(
                f"{path}: {field} = {content[field]!r} is not supported; supported: {allowed[0]!r}"
            )
    sizes = {ours: _int_field(path, content, theirs) for ours, theirs in _INT_FIELDS.items()}
    num_heads, embed_dim = sizes["num_heads"], sizes["embed_dim"]
    optional = {"num_key_value_heads": num_heads, "head_dim": embed_dim // num_heads}
    filled = content | {k: v for k, v in optional.items() if content.get(k) is None}
    try:
        config = DecoderConfig(
            **sizes,
            num_kv_heads=_int_field(path, filled, "num_key_value_heads"),
            head_dim=_int_field(path, filled, "head_dim"),
            rope_theta=_rope_theta(path, content),
            norm_eps=_number(path, "rms_norm_eps", _required(path, content, "rms_norm_eps")),
            tie_embeddings=content.get("tie_word_embeddings") is True,
        )
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    return config, ARCHITECTURES[names[0]], names[0]


def _rope_theta(path: pathlib.Path, content: Mapping[str, Any]) -> float:
    """rope_theta, which transformers 5 keeps in rope_parameters; Llama 1 has neither: 10,000."""
    parameters = content.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise DataError(f"{path}: rope_parameters must be an object, got {parameters!r}")
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise DataError(
            f"{path}: rope_parameters of type {kind!r} is not supported; supported: 'default'"
        )
    theta = parameters.get("rope_theta", content.get("rope_theta", 10_000.0))
    return _number(path, "rope_theta", theta)


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


def config_json(config: DecoderConfig, head: Head, dtype: str) -> dict[str, Any]:
    """config.json; rope_theta and dtype are written where transformers 4 and where 5 look."""
    ours = dataclasses.asdict(config)
    return {
        "architectures": [name for name, h in ARCHITECTURES.items() if h is head],
        "model_type": "llama",
        **{theirs: ours[our] for our, theirs in _INT_FIELDS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        **({"id2label": {"0": "LABEL_0"}} if head is Head.SCALAR else {}),
    }
