"""Checkpoints in Hugging Face directories: slices of their tensors; export is beside it.

Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3, in safetensors files. Nothing here reads a pickle.
"""

import pathlib

import numpy as np

from nereus_jax.core.architectures import LAYER_PREFIX, Head
from nereus_jax.core.errors import DataError
from nereus_jax.models import safetensors_file
from nereus_jax.models.huggingface_config import read_checkpoint_config, read_json
from nereus_jax.models.huggingface_config import read_config as read_config
from nereus_jax.models.huggingface_config import read_eos_ids as read_eos_ids
from nereus_jax.models.huggingface_export import export_model as export_model
from nereus_jax.models.huggingface_names import (
    NAMES,
    WEIGHTS,
    WEIGHTS_INDEX,
    Index,
    copy,
    listing,
    stored,
)

# A tied head may be stored all the same, and old files store the rotary frequencies.
_IGNORED = ("lm_head.weight", "score.weight", ".rotary_emb.inv_freq")


class TensorSource:
    """The leaves of a checkpoint, read slice by slice.

    Construction reads headers only and checks that every leaf is there with the right shape.

    Args:
      directory: with config.json and model.safetensors or model.safetensors.index.json.
      head: which head the caller needs; None takes the checkpoint's own. To start a critic from a
        language model, read a `Head.LM` source and leave its head out.

    Raises:
      DataError: as `read_config`; or a file is missing or truncated, a tensor is missing,
        superfluous or of another shape, or the checkpoint is a pickle or has another head.
    """

    def __init__(self, directory: str | pathlib.Path, head: Head | None = None) -> None:
        self.directory = pathlib.Path(directory).expanduser()
        self.config, self.head, family = read_checkpoint_config(self.directory / "config.json")
        if head is not None and head is not self.head:
            raise DataError(
                f"{self.directory} is a {family.architecture(self.head)} with a head of kind "
                f"{self.head.value}; a {family.architecture(head)} is needed here"
            )
        self._specs = {spec.name: spec for spec in self.config.spec(self.head)}
        self._tensors = _read_headers(self.directory)
        self._check()

    @property
    def leaf_names(self) -> tuple[str, ...]:
        """Every leaf that `read` knows."""
        return tuple(self._specs)

    def shape(self, leaf_name: str) -> tuple[int, ...]:
        """Logical shape of a leaf."""
        return self._specs[leaf_name].shape

    def read(self, leaf_name: str, index: Index | None = None) -> np.ndarray:
        """A slice of a leaf, reading only the bytes that it needs.

        Args:
          leaf_name: in the leaf table.
          index: a slice (step 1) for each dim of the leaf, inside its logical shape; None is all.

        Returns:
          A contiguous array in the checkpoint's dtype; where the layers of the slice differ in
          dtype, in the widest.
        """
        spec = self._specs[leaf_name]
        index = tuple(slice(None) for _ in spec.shape) if index is None else index
        if len(index) != len(spec.shape):
            raise ValueError(f"{leaf_name} has {len(spec.shape)} dims, got index {index}")
        template, transposed = NAMES[leaf_name]
        if not leaf_name.startswith(LAYER_PREFIX):
            part = _part(self._tensors[template], index, transposed)
            return copy(part, np.empty(part.shape, part.dtype))
        layers = range(spec.shape[0])[index[0]]
        tensors = [self._tensors[template.format(layer)] for layer in layers]
        parts = [_part(tensor, index[1:], transposed) for tensor in tensors]
        if not parts:
            empty = self._tensors[template.format(0)]
            part = _part(empty, index[1:], transposed)
            return np.empty((0, *part.shape), part.dtype)
        stacked = np.empty((len(parts), *parts[0].shape), np.result_type(*parts))
        for row, part in zip(stacked, parts, strict=True):
            copy(part, row)
        return stacked

    def _check(self) -> None:
        """Compares the headers with the leaf table."""
        expected = {
            name: shape for spec in self._specs.values() for name, shape in stored(spec).items()
        }
        missing = sorted(expected.keys() - self._tensors.keys())
        if missing:
            single = self.directory / WEIGHTS
            holder = single if single.is_file() else self.directory / WEIGHTS_INDEX
            raise DataError(
                f"{holder} lacks {listing(missing)}, which the model of its config.json has"
            )
        extra = sorted(
            n for n in self._tensors.keys() - expected.keys() if not n.endswith(_IGNORED)
        )
        if extra:
            raise DataError(
                f"{self._tensors[extra[0]].path} holds {listing(extra)}, which the model of its "
                "config.json does not have"
            )
        for name, shape in expected.items():
            tensor = self._tensors[name]
            if tensor.shape != shape:
                raise DataError(
                    f"{tensor.path}: {name} has shape {list(tensor.shape)}, config.json asks for "
                    f"{list(shape)}"
                )
            if tensor.dtype not in safetensors_file.DTYPES:
                raise DataError(
                    f"{tensor.path}: {name} is stored as {tensor.dtype}; supported: "
                    f"{', '.join(safetensors_file.DTYPES)}"
                )


def _part(tensor: safetensors_file.Tensor, index: Index, transposed: bool) -> np.ndarray:
    """A view of one stored tensor, in our orientation."""
    view = tensor.view()
    return view[index[::-1]].T if transposed else view[index]


def _read_headers(directory: pathlib.Path) -> dict[str, safetensors_file.Tensor]:
    """Name -> tensor over all files of a checkpoint; the index of a sharded one comes second."""
    if (directory / WEIGHTS).is_file():
        return safetensors_file.read_header(directory / WEIGHTS)
    index_path = directory / WEIGHTS_INDEX
    if not index_path.is_file():
        raise DataError(_no_weights(directory))
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise DataError(f"{index_path} has no weight_map from tensors to files")
    tensors: dict[str, safetensors_file.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        if pathlib.PurePath(file).name != file:
            raise DataError(f"{index_path}: {file!r} is not the name of a file beside it")
        placed = sorted(name for name, where in weight_map.items() if where == file)
        if not (directory / file).is_file():
            raise DataError(
                f"{directory / file} does not exist, but {WEIGHTS_INDEX} places "
                f"{listing(placed)} in it; the checkpoint is incomplete, copy it again"
            )
        header = safetensors_file.read_header(directory / file)
        missing = [name for name in placed if name not in header]
        if missing:
            raise DataError(
                f"{directory / file} lacks {listing(missing)}, which {WEIGHTS_INDEX} places in it; "
                "the files do not belong together, copy them again"
            )
        tensors |= {name: header[name] for name in placed}
    return tensors


def _no_weights(directory: pathlib.Path) -> str:
    """Why there is nothing to read, for a directory without weights under their right name."""
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    pickles = sorted(p.name for p in directory.glob("*.bin")) + sorted(
        p.name for p in directory.glob("*.pt*")
    )
    if pickles and not others:
        return (
            f"{directory} has only {pickles[0]}, a pickle, which can run any code when it is "
            "loaded; load it with transformers and save it with save_pretrained"
        )
    found = f"; rename what it has, {', '.join(others[:3])}, if that is the model" if others else ""
    return f"{directory} has neither {WEIGHTS} nor {WEIGHTS_INDEX}{found}"
