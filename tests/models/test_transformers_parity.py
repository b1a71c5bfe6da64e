"""The decoder and the engines against transformers: golden values of a tiny model of each family,
and, where torch and a real model are at hand, the tokens that transformers generates on the spot.

The last test is for a machine with torch, transformers and SmolLM2-135M-Instruct:
`NEREUS_SMOLLM2=<directory> pytest -m slow tests/models/test_transformers_parity.py`. The ones
before are its twins for every machine; `test_transformers_live.py` has more models.

Shapes: B rows, P prompt, T response, V vocabulary.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
from typing import Any

import flax.nnx as nnx
import jax
import numpy as np
import pytest
import safetensors.numpy

from nereus_jax.core.architectures import DecoderConfig, Head
from nereus_jax.core.layout import ParallelLayout
from nereus_jax.core.plan import Placement
from nereus_jax.core.roles import ACTOR_GENERATE
from nereus_jax.data.tasks import addition
from nereus_jax.data.tokenizers import HuggingFaceTokenizer
from nereus_jax.models.decoder import Decoder, bind
from nereus_jax.models.huggingface import TensorSource
from nereus_jax.models.sampling import SamplingConfig
from nereus_jax.runtime import emu, host
from nereus_jax.runtime.emu import Site
from nereus_jax.runtime.engines.generate import GenerateEngine
from nereus_jax.runtime.engines.score import ScoreEngine, ScoreKind
from nereus_jax.runtime.programs import ProgramCache
from nereus_jax.runtime.world import take_stock

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILIES = ("llama_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny")
# 4 layers, 6 query and 3 key/value heads, 103 or 61 tokens. The first two for every family: padded
# layers, tp that does not divide the key/value heads, and tp above them.
LAYOUTS = [(1, 3, 2), (1, 1, 6), (1, 1, 1), (2, 1, 3)]
TOLERANCE = 1e-4
every_family = pytest.mark.parametrize("family", FAMILIES)


def cases(num_layouts: int) -> pytest.MarkDecorator:
    """Every family on every layout; of all but Llama only the first layouts in every run."""

    def case(family: str, layout: tuple[int, int, int]) -> Any:
        always = family == "llama_tiny" or layout in LAYOUTS[:num_layouts]
        name = "{}-dp{}pp{}tp{}".format(family, *layout)
        return pytest.param(family, layout, marks=() if always else pytest.mark.slow, id=name)

    return pytest.mark.parametrize(
        ("family", "layout"), [case(f, layout) for f in FAMILIES for layout in LAYOUTS]
    )


REAL_MODEL = os.environ.get("NEREUS_SMOLLM2", "")
REAL_NEW_TOKENS = 32
WORD_PROBLEMS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did Natalia sell altogether in April and May?",
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. "
    "How much did she earn?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total "
    "does it take?",
    "James writes a 3-page letter to 2 different friends twice a week. How many pages does he "
    "write a year?",
    "Mark has a garden with flowers. He planted plants of three different colors in it. Ten of "
    "them are yellow, and there are 80% more of those in purple. There are only 25% as many green "
    "flowers as there are yellow and purple flowers. How many flowers does Mark have in his "
    "garden?",
)  # from GSM8K (Cobbe et al. 2021, MIT)


def site_of(layout: tuple[int, int, int], num_kv_heads: int) -> Site:
    world = take_stock()
    parallel = ParallelLayout(*layout)
    placement = Placement(layout=parallel, devices=world.pool.devices[: parallel.num_devices])
    return emu.make_site(world, ACTOR_GENERATE, placement, num_kv_heads)


def load(source: TensorSource, site: Site) -> emu.Params:
    return emu.load(source.config.spec(Head.LM), site, source.read)


def greedy(
    source: TensorSource,
    site: Site,
    prompts_BP: np.ndarray,
    prompt_lengths_B: np.ndarray,
    sampling: SamplingConfig,
) -> list[list[int]]:
    """The responses that the GENERATE engine finds likeliest, end token included."""
    engine = GenerateEngine(
        prefill_rows=2,
        config=source.config,
        site=site,
        dtype="float32",
        precision="highest",
        programs=ProgramCache(),
    )
    rows = np.arange(len(prompts_BP))
    arrays = engine.dispatch(load(source, site), prompts_BP, prompt_lengths_B, rows, 0, sampling)
    out = host.fetch(arrays)
    return [out["tokens"][row, : out["lengths"][row]].tolist() for row in rows]


@functools.cache
def golden(family: str) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(GOLDEN / family / "expected.safetensors")


def expected_responses(expected: dict[str, np.ndarray]) -> list[list[int]]:
    pairs = zip(expected["generated"], expected["generated_lengths"], strict=True)
    return [tokens[:length].tolist() for tokens, length in pairs]


def worst_logit(
    config: DecoderConfig, params: emu.Params, expected: dict[str, np.ndarray]
) -> float:
    """The largest difference of a logit from transformers'."""
    module = nnx.eval_shape(lambda: Decoder(config, Head.LM, rngs=nnx.Rngs(0)))
    graph = nnx.split(module)[0]
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(bind(graph, params)(jax.numpy.asarray(expected["prompts"])))
    width = expected["prompts"].shape[1]
    inside_BP = np.arange(width)[None, :] < expected["prompt_lengths"][:, None]
    return float(np.abs(logits[inside_BP] - expected["logits"][inside_BP]).max())


@every_family
def test_logits_are_those_of_transformers(family: str) -> None:
    source = TensorSource(GOLDEN / family, Head.LM)
    params = load(source, site_of((1, 1, 1), source.config.num_kv_heads))
    worst = worst_logit(source.config, params, golden(family))
    print(f"{family}: largest difference of a logit {worst:.1e}")
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("llama3_tiny", "rope_scaling"),
        ("qwen2_tiny", "layers.q_bias"),
        ("qwen2_tiny", "layers.k_bias"),
        ("qwen2_tiny", "layers.v_bias"),
        ("qwen3_tiny", "layers.q_norm"),
        ("qwen3_tiny", "layers.k_norm"),
    ],
)
def test_logits_show_what_a_family_adds(family: str, without: str) -> None:
    """So that the test before fails where a decoder leaves it out."""
    source = TensorSource(GOLDEN / family, Head.LM)
    params, config = load(source, site_of((1, 1, 1), 3)), source.config
    if without == "rope_scaling":
        config = dataclasses.replace(config, rope_scaling=None)
    else:
        params[without] = params[without] * 0 + (1 if without.endswith("norm") else 0)
    assert worst_logit(config, params, golden(family)) > 100 * TOLERANCE


@cases(2)
def test_greedy_tokens_are_those_of_transformers(family: str, layout: tuple[int, int, int]) -> None:
    source, expected = TensorSource(GOLDEN / family, Head.LM), golden(family)
    wanted = expected_responses(expected)
    assert {len(w) for w in wanted} > {24}  # by the end token, and cut
    sampling = SamplingConfig(temperature=0.0, stop_ids=(2,), pad_id=0, max_tokens=24)
    site = site_of(layout, source.config.num_kv_heads)
    got = greedy(source, site, expected["prompts"], expected["prompt_lengths"], sampling)
    assert got == wanted


@cases(1)
def test_scores_are_those_of_transformers(family: str, layout: tuple[int, int, int]) -> None:
    """The log-probability of every prompt token but the first, given the ones before it."""
    source, expected = TensorSource(GOLDEN / family, Head.LM), golden(family)
    site = site_of(layout, source.config.num_kv_heads)
    engine = ScoreEngine(
        config=source.config,
        kind=ScoreKind.LOGPROBS,
        site=site,
        dtype="float32",
        precision="highest",
        microbatch_size=2,
        temperature=1.0,
        token_chunk=16,
        programs=ProgramCache(),
    )
    prompts_BP, lengths_B = expected["prompts"], expected["prompt_lengths"]
    rows, width = prompts_BP.shape
    first_B = np.ones(rows, np.int32)
    scores = host.fetch(engine.dispatch(load(source, site), prompts_BP, first_B, lengths_B))
    got_BT = engine.unpack(scores, width, first_B, lengths_B, width - 1)["logprobs"]
    shifted_BPV = expected["logits"] - expected["logits"].max(axis=-1, keepdims=True)
    logprobs_BPV = shifted_BPV - np.log(np.exp(shifted_BPV).sum(axis=-1, keepdims=True))
    next_BT1 = prompts_BP[:, 1:, None].astype(np.int64)
    wanted_BT = np.take_along_axis(logprobs_BPV[:, :-1], next_BT1, axis=2)[:, :, 0]
    mask_BT = np.arange(width - 1)[None, :] < lengths_B[:, None] - 1
    np.testing.assert_allclose(got_BT[mask_BT], wanted_BT[mask_BT], rtol=0, atol=TOLERANCE)


def real_prompts(tokenizer: HuggingFaceTokenizer) -> list[str]:
    """Five sums and five word problems as chats."""
    sums = [addition(i, 0, digits=2, min_digits=1, style="sentence").prompt for i in range(5)]
    chats = [[{"role": "user", "content": text}] for text in (*sums, *WORD_PROBLEMS)]
    return [tokenizer.render_chat(chat) for chat in chats]


def transformers_greedy(path: str, texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts' token ids and responses by transformers in float32, one row at a time."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    responses = []
    for ids in prompts:
        row = torch.tensor([ids])
        with torch.no_grad():
            out = model.generate(
                row,
                attention_mask=torch.ones_like(row),
                max_new_tokens=REAL_NEW_TOKENS,
                do_sample=False,
            )
        responses.append(out[0, len(ids) :].tolist())
    return prompts, responses


@pytest.fixture(scope="module")
def real_reference() -> tuple[list[list[int]], list[list[int]]]:
    texts = real_prompts(HuggingFaceTokenizer(REAL_MODEL))
    return transformers_greedy(REAL_MODEL, texts)


if REAL_MODEL:  # defined only where asked for: an unmet wish is no skipped test

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 3), (1, 4, 1)], ids=str)
    def test_smollm2_generates_what_transformers_does(
        layout: tuple[int, int, int],
        real_reference: tuple[list[list[int]], list[list[int]]],
    ) -> None:
        """30 layers on pp = 4 and 9 heads on tp = 3: padded layers, and no power of two."""
        prompts, wanted = real_reference
        tokenizer = HuggingFaceTokenizer(REAL_MODEL)
        texts = real_prompts(tokenizer)
        assert [tokenizer.encode(t, add_special_tokens=False) for t in texts] == prompts
        source = TensorSource(REAL_MODEL, Head.LM)
        lengths_B = np.array([len(p) for p in prompts])
        tokens_BP = np.zeros((len(prompts), lengths_B.max()), np.int32)
        for row, ids in zip(tokens_BP, prompts, strict=True):
            row[: len(ids)] = ids
        sampling = SamplingConfig(
            temperature=0.0,
            stop_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
            max_tokens=REAL_NEW_TOKENS,
        )
        site = site_of(layout, source.config.num_kv_heads)
        assert greedy(source, site, tokens_BP, lengths_B, sampling) == wanted
