"""The stream of prompts that training consumes, made from problems of a task or of files.

Dims: B batch, P prompt.

The position in the data is counted in samples: problems consumed, dropped ones included. Everything
is a pure function of (seed, position): a run that resumes at a position sees exactly what it would
have seen.
"""

import array
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.data.tasks import SPLITS, Problem, check_task
from nereus_jax.data.tokenizers import Tokenizer

OVERLONG = ("drop", "cut")


class Problems(Protocol):
    """A finite sequence of problems."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Problem: ...


class TaskProblems:
    """Problems of a task that makes its own (see `nereus_jax.data.tasks`).

    Args:
      name: of the task.
      split: "train" or "eval"; the two share no problem.
      size: how many problems there are, at least 1; a task with few problems repeats them.
      seed: of the problems.
      options: of the task.
      distinct: no two prompts are equal: repeated ones are passed over, once, at construction.

    Raises:
      ConfigError: the task, an option, the split or the size is not usable, or there are fewer
        distinct problems than `size`.
    """

    def __init__(
        self,
        name: str,
        *,
        split: str,
        size: int,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        distinct: bool = False,
    ) -> None:
        self._options = dict(options or {})
        self._make = check_task(name, self._options)
        setting = f"data.{split}_size" if split in SPLITS else "the size"
        if size < 1:
            raise ConfigError(f"{setting} must be at least 1 for task:{name}, got {size}")
        self._split, self._size, self._seed = split, size, seed
        self._draw(0)  # bad options are reported now
        self._draws = self._distinct_draws(f"task:{name}", setting) if distinct else range(size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Problem:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self._draw(self._draws[index])

    def _draw(self, number: int) -> Problem:
        return self._make(number, self._seed, split=self._split, **self._options)

    def _distinct_draws(self, task: str, setting: str) -> Sequence[int]:
        """The numbers of the first `size` draws that repeat no prompt.

        So many draws in a row without a new prompt, that next to none can be left, end the search.
        """
        draws, seen, number = array.array("q"), set[str](), 0
        while len(draws) < self._size:
            prompt = self._draw(number).prompt
            if prompt not in seen:
                seen.add(prompt)
                draws.append(number)
            elif number - draws[-1] > 1000 + 3 * len(draws):
                raise ConfigError(
                    f"{task} has about {len(draws)} distinct {self._split} problems, fewer than "
                    f"{setting} = {self._size}; lower it, widen data.task_options, or set "
                    "data.distinct = False"
                )
            number += 1
        return draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSample:
    """One prompt, ready to be generated from.

    Attributes:
      index: position of the sample in the stream.
      prompt: the problem's own text, without chat template, system prompt and suffix; of a chat,
        the last message.
      text: all that the model reads, before cutting.
      tokens: ids of `text`, at most the limit.
      answer: the right answer.
      metadata: of the problem.
    """

    index: int
    prompt: str
    text: str
    tokens: tuple[int, ...]
    answer: str
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What `PromptStream.take` returns.

    Attributes:
      samples: as many as were asked for.
      position: where to go on.
      num_dropped: overlong prompts that were passed over.
      num_cut: samples whose prompt was cut.
    """

    samples: tuple[PromptSample, ...]
    position: int
    num_dropped: int
    num_cut: int


class PromptStream:
    """The endless sequence of prompts: every epoch all problems once, in an order of its own.

    Args:
      problems: where the problems come from; at least one.
      tokenizer: makes the token ids.
      seed: of the order; epoch e is in the order of a permutation keyed on (seed, e).
      max_prompt_length: most tokens of a prompt, at least 1.
      overlong: what to do with a longer prompt: "drop" passes it over, "cut" keeps the last tokens.
      chat_template: render the prompt as a chat.
      system_prompt: first message of the chat, or text before the prompt; empty for none. A chat
        that begins with a system message of its own keeps that one.
      prompt_suffix: text appended to the prompt (inside the last message).

    Raises:
      ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        problems: Problems,
        tokenizer: Tokenizer,
        *,
        seed: int,
        max_prompt_length: int,
        overlong: str = "drop",
        chat_template: bool = False,
        system_prompt: str = "",
        prompt_suffix: str = "",
    ) -> None:
        if max_prompt_length < 1:
            raise ConfigError(
                f"data.max_prompt_length must be at least 1 token, got {max_prompt_length}"
            )
        if overlong not in OVERLONG:
            raise ConfigError(
                f"data.overlong must be one of {', '.join(OVERLONG)}, got {overlong!r}"
            )
        if len(problems) < 1:
            raise ConfigError("there are no problems; give data with at least one")
        self._problems, self._tokenizer = problems, tokenizer
        self._seed, self._limit, self._overlong = seed, max_prompt_length, overlong
        self._chat_template, self._system_prompt = chat_template, system_prompt
        self._prompt_suffix = prompt_suffix
        self._order: tuple[int, np.ndarray] | None = None  # the last epoch used and its permutation

    def __len__(self) -> int:
        """Problems in an epoch."""
        return len(self._problems)

    def take(self, position: int, num_samples: int) -> Taken:
        """The next samples from `position` on; the same position gives the same samples.

        Args:
          position: samples consumed so far, at least 0.
          num_samples: how many samples to return.

        Raises:
          DataError: no prompt of an epoch is short enough, or a prompt cannot be encoded.
        """
        samples: list[PromptSample] = []
        num_dropped, num_cut = 0, 0
        dropped_run: list[int] = []  # lengths since the last sample that was kept
        while len(samples) < num_samples:
            sample = self._sample(position)
            length, position = len(sample.tokens), position + 1
            if length <= self._limit:
                samples.append(sample)
            elif self._overlong == "cut":
                num_cut += 1
                samples.append(dataclasses.replace(sample, tokens=sample.tokens[-self._limit :]))
            else:
                num_dropped += 1
                dropped_run.append(length)
                self._check_epoch(position, dropped_run)
                continue
            dropped_run.clear()
        return Taken(
            samples=tuple(samples), position=position, num_dropped=num_dropped, num_cut=num_cut
        )

    def _check_epoch(self, position: int, dropped: Sequence[int]) -> None:
        """Fails at the end of an epoch all of whose prompts were dropped."""
        size = len(self)
        if position % size or len(dropped) < size:
            return
        lengths = dropped[-size:]
        raise DataError(
            f"all {size} prompts are longer than data.max_prompt_length = {self._limit} tokens "
            f"(shortest {min(lengths)}, longest {max(lengths)}); raise it or set data.overlong = "
            "'cut'"
        )

    def _sample(self, position: int) -> PromptSample:
        """The sample at a position, not cut."""
        epoch, offset = divmod(position, len(self))
        index = int(self._permutation(epoch)[offset])
        problem = self._problems[index]
        try:
            text = self._text(problem)
            tokens = self._tokenizer.encode(text, add_special_tokens=not self._chat_template)
        except DataError as error:
            raise DataError(f"problem {index}: {error}") from error
        if not tokens:
            raise DataError(f"problem {index}: the prompt {text!r} has no tokens; remove it")
        return PromptSample(
            index=position,
            prompt=problem.prompt,
            text=text,
            tokens=tuple(tokens),
            answer=problem.answer,
            metadata=problem.metadata,
        )

    def _permutation(self, epoch: int) -> np.ndarray:
        order = self._order
        if order is None or order[0] != epoch:
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, epoch))))
            self._order = order = (epoch, rng.permutation(len(self)))
        return order[1]

    def _text(self, problem: Problem) -> str:
        if not self._chat_template:
            if problem.messages:
                raise DataError("its prompt is a list of messages; set data.chat_template = True")
            return self._system_prompt + problem.prompt + self._prompt_suffix
        messages = [dict(m) for m in problem.messages]
        messages = messages or [{"role": "user", "content": problem.prompt}]
        messages[-1]["content"] += self._prompt_suffix
        if self._system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return self._tokenizer.render_chat(messages)


def batch(
    samples: Sequence[PromptSample], prompt_width: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as right-padded rows.

    Args:
      samples: B prompts of at most P tokens.
      prompt_width: P.
      pad_id: fills the tail of a row.

    Returns:
      tokens_BP int32 and prompt_lengths_B int32.

    Raises:
      ValueError: a prompt is longer than P.
    """
    lengths_B = np.array([len(s.tokens) for s in samples], np.int32)
    longest = int(lengths_B.max(initial=0))
    if longest > prompt_width:
        raise ValueError(f"a prompt has {longest} tokens, more than prompt_width {prompt_width}")
    tokens_BP = np.full((len(samples), prompt_width), pad_id, np.int32)
    for row, sample in zip(tokens_BP, samples, strict=True):
        row[: len(sample.tokens)] = sample.tokens
    return tokens_BP, lengths_B
