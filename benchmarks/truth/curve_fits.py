"""Curves of kernels and links, fitted to profiles of single operations (Vidur's, medians)."""

import csv
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.simulator.curves import KernelCurve, LinkCurve
from nereus_jax.simulator.operations import product_s, ring_s, traffic_s

Floats = np.ndarray
MODELS = ("llama2-7b", "llama2-70b")
CACHED_BYTES = 80e6
"""Weights below that may stay in a device's cache from one call of a profile to the next, as they
do not in a model: products of few tokens with them are left out."""
FEW_TOKENS = 256
TAKEN = 16
"""Of the products of more than a few tokens, every so many: neighbours say the same."""
ELEMENTWISE = 6
"""Kernels of a layer that are no products."""
COLLECTIVES_TAKEN = 25
START = KernelCurve(
    peak=0.8,
    half_width=128.0,
    half_depth=64.0,
    corner=3.0,
    bandwidth=0.8,
    elementwise_bandwidth=0.6,
    kernel_s=5e-6,
    attention_peak=0.7,
    attention_half_tokens=512.0,
)
FITTED = {
    "peak": 1.0,
    "half_width": 1e4,
    "half_depth": 1e4,
    "corner": 8.0,
    "bandwidth": 1.0,
    "elementwise_bandwidth": 1.0,
    "kernel_s": 1e-4,
}
"""Parameters with the most that they may be."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """Seconds of products [N], and of a layer's elementwise kernels together [M]."""

    rows: Floats
    depth: Floats
    width: Floats
    product_s: Floats
    num_bytes: Floats
    traffic_s: Floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """Relative errors of a fit: mean of the absolute ones, and how many."""

    mean: float
    count: int


def read_profile(directory: Path, kind: str) -> Profile:
    """The products and elementwise kernels of a kind of device."""
    products: list[tuple[float, ...]] = []
    traffic: list[tuple[float, float]] = []
    for model in MODELS:
        with (directory / f"{kind}_{model}_mlp_median_ms.csv").open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))
            few = [r for r in table if int(r["num_tokens"]) <= FEW_TOKENS]
            rows = few + [r for r in table if int(r["num_tokens"]) > FEW_TOKENS][::TAKEN]
        for row in rows:
            n, tp, d, ff, heads, kv = (
                float(row[k])
                for k in (
                    "num_tokens",
                    "num_tensor_parallel_workers",
                    "n_embd",
                    "n_expanded_embd",
                    "n_head",
                    "n_kv_head",
                )
            )
            head = d / heads
            shapes = {
                "attn_pre_proj": (d, (heads + 2 * kv) * head / tp),
                "attn_post_proj": (d / tp, d),
                "mlp_up_proj": (d, 2 * ff / tp),
                "mlp_down_proj": (ff / tp, d),
            }
            for name, (depth, width) in shapes.items():
                if n > FEW_TOKENS or 2 * depth * width > CACHED_BYTES:
                    products.append((n, depth, width, 1e-3 * float(row[name])))
            # A layer's: 2 norms and 2 sums over the whole width; rotation and activation are split.
            whole, split = 20.0 * n * d, 4.0 * n * (heads + kv) * head / tp + 6.0 * n * ff / tp
            names = ("input_layernorm", "post_attention_layernorm", "add", "add")
            seconds = sum(float(row[k]) for k in (*names, "attn_rope", "mlp_act"))
            traffic.append((whole + split, 1e-3 * seconds))
    a, b = np.array(products).T, np.array(traffic).T
    return Profile(
        rows=a[0], depth=a[1], width=a[2], product_s=a[3], num_bytes=b[0], traffic_s=b[1]
    )


def _fit(
    residual: Callable[[Floats], Floats], start: Sequence[float], largest: Sequence[float]
) -> Floats:
    """Positive parameters with the least sum of smooth absolute values of residuals."""
    found = least_squares(
        lambda x: residual(np.exp(x)),
        np.log(start),
        bounds=(-np.inf, np.log(largest)),
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=60,
    )
    return np.exp(found.x)


def fit_kernels(profile: Profile, hardware: Hardware) -> tuple[KernelCurve, Error, Error]:
    """The curve of a kind of device, and its errors on products and on elementwise kernels."""
    peak, rate = hardware.peak_flops_per_s["float16"], hardware.memory_bytes_per_s

    def residuals(values: Floats) -> tuple[Floats, Floats]:
        curve = dataclasses.replace(START, **dict(zip(FITTED, map(float, values), strict=True)))
        p = profile
        products = product_s(curve, peak, rate, p.rows, p.depth, p.width, 2.0)
        traffic = traffic_s(curve, rate, p.num_bytes) + (ELEMENTWISE - 1) * curve.kernel_s
        return np.log(products / p.product_s), np.log(traffic / p.traffic_s)

    start = [getattr(START, name) for name in FITTED]
    values = _fit(lambda x: np.concatenate(residuals(x)), start, list(FITTED.values()))
    products, traffic = (np.abs(np.expm1(r)) for r in residuals(values))
    curve = dataclasses.replace(START, **dict(zip(FITTED, map(float, values), strict=True)))
    return (
        curve,
        Error(mean=float(products.mean()), count=len(products)),
        Error(mean=float(traffic.mean()), count=len(traffic)),
    )


def read_collectives(directory: Path, kind: str) -> Floats:
    """[N, 4]: ranks, ranks in a node, bytes, seconds of all-reduces."""
    path = directory / f"{kind}_dgx_all_reduce_median_ms.csv"
    table = np.genfromtxt(path, delimiter=",", skip_header=1)[::COLLECTIVES_TAKEN]
    table[:, 3] *= 1e-3
    return table


START_LINK = (0.7, 1e5, 0.4, 5e-6)
MOST_LINK = (1.0, 1e9, 0.5, 1e-3)
"""share, half_bytes, ramp, hop_s. A ramp near 1 would be a constant time, which hops are for."""


def fit_link(rows: Floats, link: Link, ranks: Floats) -> tuple[LinkCurve, Error]:
    """The curve of a link from all-reduces [N, (bytes, seconds)] over groups of `ranks` [N]."""

    def seconds(curve: LinkCurve) -> Floats:
        return np.array(
            [ring_s(curve, link, b, n, 2.0) for (b, _), n in zip(rows, ranks, strict=True)]
        )

    def curve_of(x: Floats) -> LinkCurve:
        return LinkCurve(
            share=float(x[0]), half_bytes=float(x[1]), ramp=float(x[2]), hop_s=float(x[3])
        )

    measured = rows[:, 1]
    found = _fit(lambda x: np.log(seconds(curve_of(x)) / measured), START_LINK, MOST_LINK)
    errors = np.abs(seconds(curve_of(found)) / measured - 1.0)
    return curve_of(found), Error(mean=float(errors.mean()), count=len(errors))


def hardware_of(kind: str) -> Hardware:
    """The description of a profiled kind of device."""
    return load_hardware({"a100": "a100-80gb", "h100": "h100"}[kind])
