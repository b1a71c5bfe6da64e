"""Problems of files and tasks, and the stream: resumable, complete, exact about long prompts."""

import numpy as np
import pytest

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.data.prompts import PromptStream, TaskProblems, batch
from nereus_jax.data.tasks import Problem
from nereus_jax.data.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=<>: ")


def problems_of_lengths(*lengths):
    return [Problem(prompt="x" * n, answer=str(n)) for n in lengths]


def stream(problems, **options):
    options = {"seed": 0, "max_prompt_length": 8, **options}
    return PromptStream(problems, TOKENIZER, **options)


def test_task_problems():
    problems = TaskProblems("addition", split="eval", size=5, seed=3, options={"digits": 3})
    assert len(problems) == 5
    assert problems[4] == problems[4]
    assert len(problems[0].metadata["operands"][0]) == 3
    with pytest.raises(IndexError):
        problems[5]
    with pytest.raises(ConfigError, match=r"data\.train_size must be at least 1"):
        TaskProblems("addition", split="train", size=0)
    with pytest.raises(ConfigError, match="did you mean 'addition'"):
        TaskProblems("additions", split="train", size=1)
    with pytest.raises(ConfigError, match="digits must be an int"):
        TaskProblems("addition", split="train", size=1, options={"digits": 0})


@pytest.mark.parametrize("name", ["addition", "two_steps"])
def test_distinct_problems(name):
    options = {"digits": 2, "min_digits": 1, "style": "sentence"}
    train, held_out = (
        TaskProblems(name, split=split, size=size, options=options, distinct=True)
        for split, size in (("train", 5001), ("eval", 200))
    )
    prompts = [{problems[i].prompt for i in range(len(problems))} for problems in (train, held_out)]
    assert [len(p) for p in prompts] == [5001, 200]
    assert not prompts[0] & prompts[1]
    again = TaskProblems(name, split="eval", size=20, options=options, distinct=True)
    assert [again[i] for i in range(20)] == [held_out[i] for i in range(20)]
    with pytest.raises(IndexError):
        held_out[200]


def test_fewer_distinct_problems_than_wanted():
    message = r"task:addition has about 8 distinct eval problems, fewer than data\.eval_size = 9"
    with pytest.raises(ConfigError, match=message):
        TaskProblems("addition", split="eval", size=9, options={"digits": 1}, distinct=True)
    TaskProblems("addition", split="eval", size=8, options={"digits": 1}, distinct=True)


def test_every_epoch_holds_every_problem_once_in_its_own_order():
    s = stream(problems_of_lengths(*range(1, 8)))
    taken = s.take(0, 21)
    assert [x.index for x in taken.samples] == list(range(21))
    assert (taken.position, taken.num_dropped, taken.num_cut) == (21, 0, 0)
    epochs = [[x.answer for x in taken.samples[e : e + 7]] for e in (0, 7, 14)]
    assert all(sorted(e) == list("1234567") for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert stream(problems_of_lengths(*range(1, 8)), seed=1).take(0, 21) != taken


@pytest.mark.parametrize("overlong", ["drop", "cut"])
def test_any_way_of_taking_gives_the_same_samples(overlong):
    problems = problems_of_lengths(3, 9, 5, 12, 1, 30, 8)
    whole = stream(problems, overlong=overlong).take(0, 30)
    samples, position, dropped, cut = [], 0, 0, 0
    for n in (1, 4, 0, 7, 3, 15):
        taken = stream(problems, overlong=overlong).take(position, n)  # as after a restart
        assert len(taken.samples) == n
        samples += taken.samples
        position, dropped, cut = (
            taken.position,
            dropped + taken.num_dropped,
            cut + taken.num_cut,
        )
    assert tuple(samples) == whole.samples
    assert (position, dropped, cut) == (whole.position, whole.num_dropped, whole.num_cut)
    assert position == 30 + dropped
    assert (dropped == 0) == (overlong == "cut")
    s = stream(problems, overlong=overlong)
    s.take(40, 3)  # another epoch in between changes nothing
    assert s.take(0, 30) == whole


def test_cut_keeps_the_last_tokens():
    problem = Problem(prompt="abcdefgh", answer="")
    (sample,) = stream([problem], overlong="cut", max_prompt_length=3).take(0, 1).samples
    assert TOKENIZER.decode(sample.tokens) == "fgh"
    assert sample.prompt == sample.text == "abcdefgh"


def test_prompts_of_exactly_the_limit_stay():
    taken = stream(problems_of_lengths(8, 9)).take(0, 4)
    assert {x.answer for x in taken.samples} == {"8"}
    assert taken.num_cut == 0


def test_an_epoch_without_short_prompts_is_reported():
    s = stream(problems_of_lengths(9, 30, 12))
    for position in (0, 1):
        with pytest.raises(
            DataError, match=r"all 3 prompts.* = 8 tokens \(shortest 9, longest 30\)"
        ):
            s.take(position, 1)


def test_one_short_prompt_is_found_in_every_epoch():
    taken = stream(problems_of_lengths(9, 9, 9, 2, 9)).take(0, 50)
    assert {x.answer for x in taken.samples} == {"2"}
    assert 46 * 5 < taken.position <= 50 * 5


def test_system_prompt_and_suffix_without_a_chat():
    s = stream([Problem(prompt="b", answer="")], system_prompt="a ", prompt_suffix=" c")
    assert s.take(0, 1).samples[0].text == "a b c"


class ChatTokenizer(CharacterTokenizer):
    """Renders chats as <role:content>, and insists that nothing is added to one."""

    def render_chat(self, messages):
        return "".join(f"<{m['role']}:{m['content']}>" for m in messages)

    def encode(self, text, *, add_special_tokens=True):
        assert add_special_tokens != text.startswith("<")
        return super().encode(text)


def test_chat():
    tokenizer = ChatTokenizer("abcdefghijklmnopqrstuvwxyz<>: ")
    options = {"seed": 0, "max_prompt_length": 99, "prompt_suffix": " why", "chat_template": True}
    problems = [Problem(prompt="sky", answer="")]
    plain = PromptStream(problems, tokenizer, **options).take(0, 1).samples[0]
    assert plain.text == "<user:sky why>"
    assert plain.prompt == "sky"
    system = PromptStream(problems, tokenizer, **options, system_prompt="be brief").take(0, 1)
    assert system.samples[0].text == "<system:be brief><user:sky why>"
    not_chat = PromptStream(problems, tokenizer, seed=0, max_prompt_length=9).take(0, 1)
    assert not_chat.samples[0].text == "sky"


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (("user",), "<system:s><user:a why>"),
        (("system", "user"), "<system:a><user:b why>"),
        (("user", "assistant", "user"), "<system:s><user:a><assistant:b><user:c why>"),
        (("user", "tool"), "<system:s><user:a><tool:b why>"),
        (("system",), "<system:a why>"),
    ],
)
def test_a_prompt_of_several_messages(roles, text):
    tokenizer = ChatTokenizer("abcdefghijklmnopqrstuvwxyz<>: ")
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, "abc", strict=False))
    problems = [Problem(prompt=messages[-1]["content"], answer="", messages=messages)]
    options = {"seed": 0, "max_prompt_length": 99, "prompt_suffix": " why", "system_prompt": "s"}
    for _ in range(2):  # nothing is added to the problem's own messages
        stream = PromptStream(problems, tokenizer, chat_template=True, **options)
        (sample,) = stream.take(0, 1).samples
        assert (sample.text, sample.prompt) == (text, messages[-1]["content"])
    with pytest.raises(
        DataError, match=r"problem 0: its prompt is a list of messages; set data\.c"
    ):
        PromptStream(problems, tokenizer, **options).take(0, 1)


def test_stream_errors():
    problems = problems_of_lengths(1)
    with pytest.raises(ConfigError, match="max_prompt_length must be at least 1 token, got 0"):
        stream(problems, max_prompt_length=0)
    with pytest.raises(ConfigError, match="overlong must be one of drop, cut, got 'trim'"):
        stream(problems, overlong="trim")
    with pytest.raises(ConfigError, match="no problems"):
        stream([])
    with pytest.raises(DataError, match="problem 0: character 'É'"):
        stream([Problem(prompt="É", answer="")]).take(0, 1)
    with pytest.raises(DataError, match="problem 0: the prompt '' has no tokens"):
        stream([Problem(prompt="", answer="")]).take(0, 1)


def test_batch_pads_on_the_right():
    samples = stream(problems_of_lengths(2, 3), seed=0).take(0, 2).samples
    tokens_BP, lengths_B = batch(samples, 4, pad_id=0)
    assert tokens_BP.dtype == lengths_B.dtype == np.int32
    x = TOKENIZER.encode("x")[0]
    expected = {2: [x, x, 0, 0], 3: [x, x, x, 0]}
    assert [expected[n] for n in lengths_B] == tokens_BP.tolist()
    with pytest.raises(ValueError, match="3 tokens, more than prompt_width 2"):
        batch(samples, 2, pad_id=0)
    assert batch([], 4, pad_id=0)[0].shape == (0, 4)
