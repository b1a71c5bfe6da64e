"""Published training steps as cases that the cost model can price.

Sizes and schedules that a table of measurements does not state come from the sources' own
documents: MPT sizes and FSDP settings (mosaicml/llm-foundry, scripts/train/benchmarking), the BLOOM
176B search (bigscience-workshop, tr11-176B-ml/chronicles-prequel: Megatron-DeepSpeed with
recomputation and ZeRO-1, a vocabulary of 250k), InternLM-7B (InternLM/InternEvo,
doc/en/train_performance), torchtitan's Llama 3 tables, and Megatron's models (Korthikanti et al.
2022, table 3).
"""

import csv
import dataclasses
import re
from pathlib import Path

import numpy as np

from nereus_jax.core.architectures import Head
from nereus_jax.core.hardware import Hardware, Link
from nereus_jax.core.roles import ACTOR_TRAIN
from nereus_jax.planning.calibration import Efficiencies
from nereus_jax.planning.candidates import Candidates
from nereus_jax.planning.cost import StageCost, stage_seconds
from nereus_jax.planning.cost_terms import DataSync, Execution, ModelSizes, RowFill
from nereus_jax.planning.hardware import load_hardware
from nereus_jax.planning.workload import LengthHistogram, Workload

Row = dict[str, str]

MPT = {  # name: width, layers, heads
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 24, 16),
    "MPT-760m": (1536, 24, 12),
    "MPT-1b": (2048, 24, 16),
    "MPT-3b": (2560, 32, 20),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 48, 56),
    "MPT-70b": (8192, 80, 64),
}
MPT_VOCAB = 50_368
BLOOM_VOCAB = 250_880
LLAMA3 = {  # width, layers, heads, key/value heads, feed-forward
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
}
MEGATRON = {  # width, layers, heads, tp, pp, devices, batch, microbatch, interleave
    "GPT-22B": (6144, 48, 64, 8, 1, 8, 4, 4, 1),
    "GPT-175B": (12288, 96, 96, 8, 8, 64, 64, 1, 3),
    "GPT-530B": (20480, 105, 128, 8, 35, 280, 280, 1, 3),
}

# bytes/s of a device to other nodes, as the tables state it
_NETWORK = {
    "A100-80GB (8/node, NVLink; 4x100Gb OPA/node)": ("a100-80gb", 6.25e9),
    "A100-80GB-SXM (4x100Gb RoCE/node)": ("a100-80gb", 6.25e9),
    "A100-80GB": ("a100-80gb", 25e9),
    "A100-40GB": ("a100-40gb", 25e9),
    "H100-80GB-SXM": ("h100", 50e9),
    "H100 96GB HBM2e 2.4TB/s 500W (8/node, 400Gb/s per GPU)": ("h100-96gb", 50e9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement and what it was measured of.

    Attributes:
      source: short name of the table.
      hardware_key: the cluster; efficiencies are one set for each.
      model: its name.
      label: the layout, for printing.
      section: what the table says of the row beside its layout; rows of one section are alike.
      measured_s: of a step.
      devices: in all.
      model_flops: forward and backward without recomputation, for a constant utilization.
    """

    source: str
    hardware_key: str
    model: str
    label: str
    section: str
    hardware: Hardware
    sizes: ModelSizes
    workload: Workload
    layout: Candidates
    execution: Execution
    dtype: str
    measured_s: float
    devices: int
    model_flops: float

    def cost(self, efficiencies: Efficiencies) -> StageCost:
        """Modelled seconds."""
        return stage_seconds(
            self.sizes,
            Head.LM,
            ACTOR_TRAIN,
            self.workload,
            self.hardware,
            efficiencies,
            self.layout,
            dtype=self.dtype,
            execution=self.execution,
        )


def training_cases(path: Path) -> list[Case]:
    """Every dense bfloat16 or float16 step of the five sources that ran and whose row is sound."""
    makers = {
        "bigscience-workshop/bigscience": ("BLOOM", _bloom),
        "mosaicml/llm-foundry": ("llm-foundry", _mpt),
        "InternLM/InternEvo": ("InternEvo", _internlm),
        "pytorch/torchtitan": ("torchtitan", _llama),
        "NVIDIA/Megatron-LM": ("Megatron", _megatron),
    }
    cases: list[Case] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, maker = makers.get(row["source"].split(" ")[0], ("", None))
            if row["category"] != "train_step" or maker is None:
                continue
            if row["precision"] not in ("bf16", "fp16") or row["quality"].startswith("SUSPECT"):
                continue
            case = maker(name, row)
            if case is not None:
                cases.append(case)
    return cases


def _number(row: Row, name: str, default: float = 1.0) -> float:
    try:
        return float(row[name])
    except ValueError:
        return default


def _sizes(
    width: int,
    layers: int,
    heads: int,
    vocab: int,
    *,
    kv_heads: int | None = None,
    mlp: int | None = None,
    gated: bool = False,
    tied: bool = True,
) -> ModelSizes:
    mlp, kv_heads = mlp or 4 * width, kv_heads or heads
    kv = width * kv_heads // heads
    matrices = 3 if gated else 2
    layer = 2 * width * width + 2 * width * kv + matrices * width * mlp
    return ModelSizes(
        num_layers=layers,
        embed_dim=width,
        query_dim=width,
        kv_dim=kv,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_dim=mlp,
        mlp_matrices=matrices,
        vocab_size=vocab,
        params=float(layers * layer + vocab * width * (1 if tied else 2)),
    )


def _case(
    source: str,
    row: Row,
    sizes: ModelSizes,
    execution: Execution,
    *,
    dp: int,
    tp: int,
    pp: int,
    microbatch: int,
    accumulation: int,
    batch: int,
    seq: int,
    measured_s: float,
    remat: bool,
    zero1: bool,
) -> Case:
    """A step of one update over `batch` rows of `seq` tokens."""
    name, inter = _NETWORK[row["hardware"]]
    hardware = load_hardware(name)
    link = Link(bytes_per_s=inter, latency_s=hardware.inter_node.latency_s)
    hardware = dataclasses.replace(hardware, inter_node=link)
    micro, flushes = (accumulation, 1) if pp > 1 else (1, accumulation)
    one = np.ones(1, np.int64)
    layout = Candidates(
        dp=dp * one,
        pp=pp * one,
        tp=tp * one,
        microbatch_size=microbatch * one,
        microbatches=micro * one,
        accumulation=flushes * one,
        remat=np.array([remat]),
        zero1=np.array([zero1]),
    )
    workload = Workload(
        prompts=batch,
        prompt_lengths=LengthHistogram.constant(1),
        response_lengths=LengthHistogram.constant(seq - 1),
        max_response_tokens=seq - 1,
        minibatch_size=batch,
    )
    scores = 12.0 * sizes.num_layers * sizes.query_dim * seq
    return Case(
        source=source,
        hardware_key=row["hardware"],
        model=row["model"],
        label=f"dp={dp},pp={pp},tp={tp} x{microbatch}" + (" remat" if remat else ""),
        section=row["notes"] if source == "BLOOM" else "",
        hardware=hardware,
        sizes=sizes,
        workload=workload,
        layout=layout,
        execution=execution,
        dtype={"bf16": "bfloat16", "fp16": "float16"}[row["precision"]],
        measured_s=measured_s,
        devices=dp * tp * pp,
        model_flops=batch * seq * (6.0 * sizes.params + scores),
    )


def _bloom(source: str, row: Row) -> Case | None:
    if not row["step_time_s"]:
        return None
    width = int(re.search(r"hidden (\d+)", row["notes"])[1])  # type: ignore[index]
    other = re.search(r"NHIDDEN (\d+)", row["notes"])
    width = int(other[1]) if other else width
    stated = re.search(r"layers (\d+)", row["notes"])
    params = _number(row, "params_b") * 1e9
    layers = int(stated[1]) if stated else round((params - BLOOM_VOCAB * width) / (12 * width**2))
    heads = re.search(r"heads (\d+)", row["notes"])
    tp, pp, devices = (int(_number(row, n)) for n in ("tp", "pp", "n_gpus"))
    dp, batch, micro = devices // (tp * pp), int(_number(row, "gbs")), int(_number(row, "mbs"))
    execution = Execution(
        rows=RowFill.EXACT,
        score_bytes=8.0,  # half precision scores written, read and written by the softmax, read
        vocab_over_pp=False,
        padded_layers=False,
        recomputed_all_reduces=2,
        p2p_scattered=True,
        grad_bytes=4.0 if row["precision"] == "bf16" else 2.0,
        gather_bytes=2.0,
        head_passes=3.0,
    )
    return _case(
        source,
        row,
        _sizes(width, layers, int(heads[1]) if heads else width // 128, BLOOM_VOCAB),
        execution,
        dp=dp,
        tp=tp,
        pp=pp,
        microbatch=micro,
        accumulation=max(round(batch / (dp * micro)), 1),
        batch=batch,
        seq=int(_number(row, "seq_len")),
        measured_s=float(row["step_time_s"]),
        remat=True,
        zero1=row["shard"] == "ZeRO-1",
    )


def _mpt(source: str, row: Row) -> Case:
    width, layers, heads = MPT[row["model"]]
    devices, micro, batch = (int(_number(row, n)) for n in ("n_gpus", "mbs", "gbs"))
    sync = DataSync.SHARDED if row["shard"] == "FULL_SHARD" else DataSync.SHARDED_GRADS
    execution = Execution(
        rows=RowFill.EXACT,
        score_bytes=0.0,
        score_share=0.5,
        sync=sync,
        grad_bytes=2.0,
        head_passes=3.0,
    )
    return _case(
        source,
        row,
        _sizes(width, layers, heads, MPT_VOCAB),
        execution,
        dp=devices,
        tp=1,
        pp=1,
        microbatch=micro,
        accumulation=max(round(batch / (devices * micro)), 1),
        batch=batch,
        seq=int(_number(row, "seq_len")),
        measured_s=float(row["step_time_s"]),
        remat=row["act_ckpt"] == "True",
        zero1=False,
    )


def _internlm(source: str, row: Row) -> Case:
    devices, tp, micro = (int(_number(row, n)) for n in ("n_gpus", "tp", "mbs"))
    dp, seq = devices // tp, int(_number(row, "seq_len"))
    accumulation = int(re.search(r"micro_num (\d+)", row["notes"])[1])  # type: ignore[index]
    batch = dp * micro * accumulation
    shard = int(re.search(r"zero1=(-?\d+)", row["shard"])[1])  # type: ignore[index]
    execution = Execution(
        rows=RowFill.EXACT,
        score_bytes=0.0,
        score_share=0.5,
        sync=DataSync.OVERLAPPED,
        zero_ranks=max(shard, 0),
        zero_scatters=False,  # hybrid_zero_optim.py sums whole buckets on all replicas
        grad_bytes=2.0,
        gather_bytes=2.0,
        head_passes=3.0,
    )
    sizes = _sizes(4096, 32, 32, 103_168, mlp=11008, gated=True, tied=False)
    return _case(
        source,
        row,
        sizes,
        execution,
        dp=dp,
        tp=tp,
        pp=1,
        microbatch=micro,
        accumulation=accumulation,
        batch=batch,
        seq=seq,
        measured_s=batch * seq / (float(row["tokens_per_s_per_gpu"]) * devices),
        remat=row["act_ckpt"].lower() == "true",
        zero1=True,
    )


def _llama(source: str, row: Row) -> Case:
    size = "70B" if "70B" in row["model"] else "8B"
    width, layers, heads, kv_heads, mlp = LLAMA3[size]
    devices, tp, micro, batch = (int(_number(row, n)) for n in ("n_gpus", "tp", "mbs", "gbs"))
    seq, dp = int(_number(row, "seq_len")), devices // tp
    execution = Execution(
        rows=RowFill.EXACT,
        score_bytes=0.0,
        score_share=0.5,
        sync=DataSync.SHARDED,
        sequence_parallel=True,
        recomputed_all_reduces=2,
        grad_bytes=4.0,  # FSDP2 reduces in float32 there
        head_passes=3.0,
    )
    return _case(
        source,
        row,
        _sizes(width, layers, heads, 128_256, kv_heads=kv_heads, mlp=mlp, gated=True, tied=False),
        execution,
        dp=dp,
        tp=tp,
        pp=1,
        microbatch=micro,
        accumulation=max(round(batch / (dp * micro)), 1),
        batch=batch,
        seq=seq,
        measured_s=batch * seq / (float(row["tokens_per_s_per_gpu"]) * devices),
        remat=row["act_ckpt"] == "full",
        zero1=False,
    )


def _megatron(source: str, row: Row) -> Case | None:
    if row["model"] not in MEGATRON:
        return None
    width, layers, heads, tp, pp, devices, batch, micro, parts = MEGATRON[row["model"]]
    dp, seq = devices // (tp * pp), 2048
    execution = Execution(
        rows=RowFill.EXACT,
        score_bytes=8.0,
        vocab_over_pp=False,
        padded_layers=False,
        interleave=parts,
        recompute_attention_only=True,
        sequence_parallel=True,
        p2p_scattered=True,
        grad_bytes=4.0,
        head_passes=3.0,
    )
    case = _case(
        source,
        row,
        _sizes(width, layers, heads, 51_200),
        execution,
        dp=dp,
        tp=tp,
        pp=pp,
        microbatch=micro,
        accumulation=batch // (dp * micro),
        batch=batch,
        seq=seq,
        measured_s=1.0,
        remat=True,
        zero1=False,
    )
    peak = case.hardware.peak_flops_per_s[case.dtype] * devices
    return dataclasses.replace(
        case, measured_s=case.model_flops / (float(row["mfu_pct"]) / 100 * peak)
    )
