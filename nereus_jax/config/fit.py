"""The plan of a configuration on fewer devices than it was written for."""

import dataclasses
from collections.abc import Mapping

from nereus_jax.config.plan_entry import PlanEntry, largest_layout
from nereus_jax.config.schema import RunConfig


def fit_plans(config: RunConfig, num_devices: int) -> tuple[RunConfig, list[str]]:
    """Replaces the layouts, also those of planned changes, that need devices which are not there.

    Such a model-stage gets the largest layout on the first devices whose degrees divide its own, so
    that model and batches can still be cut; the others stay where they are.

    Args:
      config: of the run.
      num_devices: of the pool, >= 1.

    Returns:
      The configuration, and a line for each layout that was replaced.
    """
    said: list[str] = []
    plan = _fit("plan", config.plan, num_devices, said)
    changes = {
        step: entries
        if isinstance(entries, str)
        else _fit(f"plan_changes.{step}", entries, num_devices, said)
        for step, entries in config.plan_changes.items()
    }
    return dataclasses.replace(config, plan=plan, plan_changes=changes), said


def _fit(
    section: str, entries: Mapping[str, PlanEntry], num_devices: int, said: list[str]
) -> dict[str, PlanEntry]:
    fitted: dict[str, PlanEntry] = {}
    for name, entry in entries.items():
        fits = max(entry.positions) < num_devices
        fitted[name] = entry if fits else largest_layout(entry, num_devices)
        if not fits:
            said.append(
                f"{section}.{name}: '{entry}' needs more than the {num_devices} devices that there "
                f"are; '{fitted[name]}' takes its place"
            )
    return fitted
