"""Supervised training of the actor on the answers, before the first RL step.

Shapes: B rows, P prompt, T response, S = P + T.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from nereus_jax.core.errors import DivergenceError
from nereus_jax.data.prompts import PromptSample, batch
from nereus_jax.rl.losses import token_weights
from nereus_jax.runtime import host
from nereus_jax.runtime.dispatch import MAX_IN_FLIGHT
from nereus_jax.runtime.emu import Params
from nereus_jax.trainer.job import Job, make_warmup_engine


def answer_rows(job: Job, samples: Sequence[PromptSample]) -> tuple[np.ndarray, ...]:
    """Prompts followed by their answers and an end token.

    Returns:
      (tokens [B, S] int32, prompt lengths [B], response lengths [B]). An answer longer than
      `rollout.max_response_length` is cut and then has no end token.
    """
    tokenizer, width = job.inputs.tokenizer, job.config.rollout.max_response_length
    prompts_BP, lengths_B = batch(samples, job.config.data.max_prompt_length, tokenizer.pad_id)
    tokens_BS = np.pad(prompts_BP, ((0, 0), (0, width)), constant_values=tokenizer.pad_id)
    response_lengths_B = np.zeros(len(samples), np.int32)
    for row, sample in enumerate(samples):
        answer = tokenizer.encode(sample.answer, add_special_tokens=False)
        ids = [*answer, job.inputs.stop_ids[0]][:width]
        start = lengths_B[row]
        tokens_BS[row, start : start + len(ids)] = ids
        response_lengths_B[row] = len(ids)
    return tokens_BS, lengths_B, response_lengths_B


def run_warmup(job: Job, params: Params, report: Callable[[str], None]) -> tuple[Params, int]:
    """Trains on the answers; `params` are given up.

    Returns:
      The trained parameters, and the samples consumed. The optimizer ends here, so that its state
      and that of RL never take memory at the same time.
    """
    config = job.config.warmup
    engine = make_warmup_engine(job)
    state = engine.init(params)
    position, width = 0, job.config.rollout.max_response_length
    for step in range(config.num_steps):
        taken = job.inputs.train_prompts.take(position, config.batch_size)
        position = taken.position
        tokens_BS, prompt_lengths_B, response_lengths_B = answer_rows(job, taken.samples)
        mask_BT = np.arange(width)[None, :] < response_lengths_B[:, None]
        state, metrics = engine.dispatch(
            state,
            tokens_BS,
            prompt_lengths_B,
            prompt_lengths_B + response_lengths_B,
            {"weights": token_weights(mask_BT, "token")},
            {},
        )
        if step % MAX_IN_FLIGHT == MAX_IN_FLIGHT - 1:
            jax.block_until_ready(metrics)
        last = step == config.num_steps - 1
        if last or step % 20 == 0:
            values = host.fetch(metrics)
            if not values["finite"]:
                raise DivergenceError(
                    f"the supervised warm-up diverged at update {step} of {config.num_steps}; "
                    f"lower warmup.learning_rate (now {config.learning_rate})"
                )
            report(f"warm-up {step + 1}/{config.num_steps} | loss {float(values['loss']):.3f} nats")
    return dict(state.params), position
