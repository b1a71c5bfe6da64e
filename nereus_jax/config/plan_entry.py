"""Parallel layouts as the configuration writes them: 'dp=2,pp=2,tp=2,devices=0-7'; with `parked`
between them the model-stage waits in host memory between its calls."""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Mapping

from nereus_jax.core.errors import ConfigError
from nereus_jax.core.layout import divisors

_DEGREES = ("dp", "pp", "tp")
_PARKED = "parked"
_FORM = "write 'dp=2,pp=2,tp=2' or 'dp=2,pp=1,tp=2,devices=0-3'"
_MAX_DEVICE_POSITION = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """The layout of one model-stage and, when they were named, its devices.

    The constructor does not check anything; `parse_plan_entry` does.
    """

    dp: int = 1
    """Data-parallel replicas, >= 1."""
    pp: int = 1
    """Pipeline ranks of a replica, >= 1."""
    tp: int = 1
    """Tensor-parallel ranks of a pipeline rank, >= 1."""
    devices: tuple[int, ...] | None = None
    """Ascending positions in the device pool, dp * pp * tp of them; None: the first ones."""
    parked: bool = False
    """Whether the model-stage waits in host memory while others run."""

    @property
    def num_devices(self) -> int:
        """Devices that the layout takes."""
        return self.dp * self.pp * self.tp

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions in the device pool, whether they were named or not."""
        return tuple(range(self.num_devices)) if self.devices is None else self.devices

    def __str__(self) -> str:
        """The text that `parse_plan_entry` reads back to an equal entry."""
        text = f"dp={self.dp},pp={self.pp},tp={self.tp}" + (f",{_PARKED}" if self.parked else "")
        return text if self.devices is None else f"{text},devices={_format_positions(self.devices)}"


def _format_positions(positions: tuple[int, ...]) -> str:
    parts: list[str] = []
    # In a run of consecutive positions, the position minus its rank stays the same.
    for _, run in itertools.groupby(enumerate(positions), lambda item: item[1] - item[0]):
        members = [position for _, position in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


def _parse_positions(text: str, where: str) -> tuple[int, ...]:
    positions: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise ConfigError(
                f"{where}: devices={text!r} holds {part.strip()!r}, neither a position nor a "
                "range; write devices=0-3 or devices=0,2,4"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > _MAX_DEVICE_POSITION:
            raise ConfigError(
                f"{where}: devices={text!r} holds the range {part.strip()!r}; allowed are "
                f"ascending positions up to {_MAX_DEVICE_POSITION}, such as {min(first, last)}-"
                f"{min(max(first, last), _MAX_DEVICE_POSITION)}"
            )
        positions.extend(range(first, last + 1))
    ascending = sorted(positions)
    duplicates = [a for a, b in itertools.pairwise(ascending) if a == b]
    if duplicates:
        raise ConfigError(
            f"{where}: devices={text!r} names device {duplicates[0]} more than once; name every "
            "device once"
        )
    if positions != ascending:
        raise ConfigError(
            f"{where}: devices={text!r} is not in ascending order; write "
            f"devices={_format_positions(tuple(ascending))}"
        )
    return tuple(positions)


def _parse_degrees(text: str, where: str) -> PlanEntry:
    degrees: dict[str, int] = {}
    parts = [part.strip() for part in text.split(",")]
    for part in filter(None, (part for part in parts if part != _PARKED)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _DEGREES:
            close = difflib.get_close_matches(name, (*_DEGREES, _PARKED, "devices"), 1, 0.5)
            hint = f"did you mean {close[0]!r}? " if close and close[0] != name else ""
            raise ConfigError(
                f"{where}: {part!r} is not one of dp=N, pp=N, tp=N, {_PARKED} and a last "
                f"devices=LIST; {hint}{_FORM}"
            )
        if name in degrees:
            raise ConfigError(f"{where}: {name} is given twice; {_FORM}")
        if re.fullmatch(r"[0-9]+", value) is None or not 1 <= int(value) <= _MAX_DEVICE_POSITION:
            raise ConfigError(
                f"{where}: {name} must be an integer >= 1 and <= {_MAX_DEVICE_POSITION}, got "
                f"{value!r}; {_FORM}"
            )
        degrees[name] = int(value)
    if not degrees:
        raise ConfigError(f"{where}: names none of dp, pp and tp; {_FORM}")
    dp, pp, tp = (degrees.get(name, 1) for name in _DEGREES)
    return PlanEntry(dp=dp, pp=pp, tp=tp, parked=_PARKED in parts)


def canonical_model_stage(name: str) -> str:
    """The spelling 'actor-TRAIN' of a model-stage that may be written 'actor_TRAIN'."""
    return name.replace("_", "-", 1)


def parse_plan_entry(text: str, model_stage: str = "", section: str = "plan") -> PlanEntry:
    """Reads one layout.

    Args:
      text: 'dp=2,pp=2,tp=2', or the same with a last 'devices=0-3,6': ascending positions in the
        pool, which may themselves hold commas. A degree that is not named is 1. 'parked' may stand
        before the devices.
      model_stage: the name that an error shows, such as 'actor-TRAIN'.
      section: the section of the configuration that an error shows.

    Raises:
      ConfigError: the text has another form, or names another number of devices than dp * pp * tp.
    """
    where = f"{section}.{model_stage}={text!r}" if model_stage else f"plan entry {text!r}"
    head, named, positions = text.partition("devices=")
    if named and head.strip() and not head.rstrip().endswith(","):
        raise ConfigError(f"{where}: 'devices=' must follow a comma; {_FORM}")
    if "=" in positions:
        raise ConfigError(f"{where}: 'devices=' must come last; {_FORM}")
    entry = _parse_degrees(head, where)
    if not named:
        return entry
    devices = _parse_positions(positions, where)
    if len(devices) != entry.num_devices:
        raise ConfigError(
            f"{where}: dp*pp*tp = {entry.num_devices} devices, got {len(devices)} in 'devices='; "
            f"name {entry.num_devices} devices or change the degrees"
        )
    return dataclasses.replace(entry, devices=devices)


def check_plan_against_model(
    plan: Mapping[str, PlanEntry],
    num_heads: int,
    num_layers: int | None = None,
    section: str = "plan",
) -> None:
    """Checks that the model can be cut as the plan says.

    Args:
      plan: model-stage name -> layout; only those of models with these sizes.
      num_heads: query heads of the model, >= 1.
      num_layers: decoder layers of the model, or None to leave pp unchecked.
      section: the section of the configuration that an error shows.

    Raises:
      ConfigError: tp does not divide the query heads, or there are more pipeline ranks than layers.
    """
    for name, entry in plan.items():
        if num_heads % entry.tp:
            allowed = ", ".join(map(str, divisors(num_heads)))
            raise ConfigError(
                f"{section}.{name}: tp={entry.tp} does not divide the {num_heads} query heads of "
                f"the model; allowed tp: {allowed}"
            )
        if num_layers is not None and entry.pp > num_layers:
            raise ConfigError(
                f"{section}.{name}: pp={entry.pp} pipeline ranks, got a model of {num_layers} "
                f"layers; allowed pp: 1 to {num_layers}"
            )


def largest_layout(entry: PlanEntry, num_devices: int) -> PlanEntry:
    """The largest layout on at most `num_devices` devices whose degrees divide those of `entry`."""
    candidates = [
        PlanEntry(dp=dp, pp=pp, tp=tp, parked=entry.parked)
        for tp in divisors(entry.tp)
        for pp in divisors(entry.pp)
        for dp in divisors(entry.dp)
        if dp * pp * tp <= num_devices
    ]
    return max(candidates, key=lambda c: (c.num_devices, c.tp, c.pp))


def check_plan_against_devices(
    plan: Mapping[str, PlanEntry], num_devices: int, section: str = "plan"
) -> None:
    """Checks that the pool holds the devices that the plan asks for.

    Args:
      plan: model-stage name -> layout.
      num_devices: devices of the pool over all processes, >= 1.
      section: the section of the configuration that an error shows.

    Raises:
      ConfigError: a layout is larger than the pool or names a position beyond it.
    """
    for name, entry in plan.items():
        needed = max(entry.positions) + 1
        if needed <= num_devices:
            continue
        if entry.num_devices <= num_devices:
            raise ConfigError(
                f"{section}.{name}: '{entry}' names device {needed - 1}, got a pool of "
                f"{num_devices} devices; allowed positions: 0 to {num_devices - 1}, or drop "
                f"'devices='"
            )
        raise ConfigError(
            f"{section}.{name}: '{entry}' asks for {entry.num_devices} devices, got a pool of "
            f"{num_devices}; use at most {num_devices}, such as "
            f"'{largest_layout(entry, num_devices)}', or set emulated_devices to run on emulated "
            "CPU devices"
        )
