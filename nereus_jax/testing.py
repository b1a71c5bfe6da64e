"""Small things to test with: a tiny model and configuration, a pool of devices without a backend.

Public: embedders may build their own tests on them.
"""

import math
import re
from typing import Any

from nereus_jax.config import default_config
from nereus_jax.core.architectures import DecoderConfig
from nereus_jax.core.devices import DevicePool
from nereus_jax.data.tokenizers import CharacterTokenizer


def tiny_decoder(**changes: Any) -> DecoderConfig:
    """A decoder of a few thousand parameters whose sizes divide by little.

    Five layers, six key/value heads, an odd vocabulary: pp=2, tp=4 and most other layouts have to
    pad or to replicate.
    """
    sizes: dict[str, Any] = {
        "num_layers": 5,
        "embed_dim": 32,
        "num_heads": 12,
        "num_kv_heads": 6,
        "head_dim": 8,
        "mlp_dim": 50,
        "vocab_size": 51,
    }
    return DecoderConfig(**(sizes | changes))


def toy_tokenizer() -> CharacterTokenizer:
    """One token a character: digits and signs of arithmetic."""
    return CharacterTokenizer("0123456789+-= ")


def fake_pool(num_hosts: int = 2, devices_per_host: int = 8, kind: str = "h100") -> DevicePool:
    """A pool of devices that no backend has, for what works on values alone."""
    return DevicePool.uniform(num_hosts, devices_per_host, kind)


def tiny_run_config() -> Any:
    """A configuration (ConfigDict) that trains for two short steps on one device."""
    config = default_config()
    config.num_steps = 2
    config.model.num_layers = 2
    config.model.embed_dim = 32
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 8
    config.model.mlp_dim = 64
    config.tokenizer.characters = "0123456789="
    config.data.train = config.data.eval = "task:reverse_digits"
    config.data.train_size = config.data.eval_size = 1000
    config.data.max_prompt_length = 6
    config.reward.function = "nereus_jax.rl.rewards.digit_match"
    config.rollout.batch_size = 16
    config.rollout.max_response_length = 4
    config.algorithm.minibatch_size = 8
    config.actor_optimizer.learning_rate = 1e-3
    config.critic_optimizer.learning_rate = 1e-3
    config.train.microbatch_size = 4
    config.plan["actor-TRAIN"] = "dp=1,pp=1,tp=1"
    config.plan["critic-TRAIN"] = "dp=1,pp=1,tp=1"
    return config


def collective_wire_bytes(hlo_text: str, num_devices: int) -> int:
    """Bytes that the collectives of a compiled program move between devices, over all of them.

    Read from the text alone (`compiled.as_text()`), so that it can check what a program was meant
    to move. A permutation moves its operand once for each pair of different devices; of the others
    the bytes are those of ring algorithms. A collective in a loop counts once.

    Args:
      hlo_text: of one program, after partitioning.
      num_devices: that the program runs on.

    Raises:
      ValueError: a collective, a shape or a list of groups that is not known here.
    """
    return sum(_line_wire_bytes(line, num_devices) for line in hlo_text.splitlines())


_COLLECTIVE = re.compile(
    r"\s=\s+(?P<result>.*?)\s(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all"
    r"|ragged-all-to-all|collective-permute|collective-broadcast)(?P<start>-start)?\("
)


def _line_wire_bytes(line: str, num_devices: int) -> int:
    found = _COLLECTIVE.search(line)
    if found is None:
        return 0
    kind, shapes = found["kind"], re.findall(r"([a-z]\w*)\[([\d,]*)\]", found["result"])
    if kind == "ragged-all-to-all":
        raise ValueError(f"what it moves depends on values: {line.strip()}")
    sizes = [_shape_bytes(dtype, dims) for dtype, dims in shapes]
    if kind == "collective-permute":
        if found["start"]:
            # Operands, results, and on some backends two scalars of context.
            sizes = sizes[:-2] if len(shapes) > 2 and shapes[-2:] == [("u32", "")] * 2 else sizes
            sizes = sizes[len(sizes) // 2 :]
        pairs = re.findall(r"\{(\d+),(\d+)\}", line.split("source_target_pairs=")[1])
        return sum(sizes) * sum(sender != receiver for sender, receiver in pairs)
    total = 0
    for members in _group_sizes(line, num_devices):
        num_bytes = sum(sizes)
        if found["start"] and kind in ("all-gather", "reduce-scatter"):
            # Operands and results, of which one is `members` times the other.
            num_bytes = num_bytes // (members + 1) * (members if kind == "all-gather" else 1)
        elif found["start"] and kind in ("all-to-all", "collective-broadcast"):
            num_bytes //= 2
        # A device keeps its own part of the result, of which there is one on each. A sum sends it
        # around twice; where the result is scattered, the operand is `members` times as long.
        factor = {"all-reduce": 2, "reduce-scatter": members}.get(kind, 1)
        total += factor * (members - 1) * num_bytes
    return total


def _shape_bytes(dtype: str, dims: str) -> int:
    width = re.match(r"[a-z]+(\d+)", dtype)
    if dtype != "pred" and width is None:
        raise ValueError(f"an element of {dtype} has no known size")
    bits = 8 if width is None else int(width[1])
    return math.prod(int(n) for n in dims.split(",") if n) * bits // 8


def _group_sizes(line: str, num_devices: int) -> list[int]:
    """How many devices each group of a collective has."""
    _, found, groups = line.partition("replica_groups=")
    if not found or groups.startswith("{}"):
        return [num_devices]
    if iota := re.match(r"\[(\d+),(\d+)\]<=", groups):
        return [int(iota[2])] * int(iota[1])
    # Which device is where in the mesh (device_ids) does not matter for the sizes.
    if named := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\(.*?\))?\s*\{([^}]*)\}", groups):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        # A part of an axis is written 'axis':(what comes before it)its size.
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        members = math.prod(int(part) if part else sizes[axis] for axis, part in axes)
        return [members] * (num_devices // members)
    if listed := re.match(r"\{(\{[\d,]+\},?)+\}", groups):
        return [g.count(",") + 1 for g in re.findall(r"\{([\d,]+)\}", listed[0])]
    raise ValueError(f"groups in an unknown notation: {groups[:80]}")
