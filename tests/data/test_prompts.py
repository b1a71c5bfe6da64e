"""Problems of files and tasks, and the stream: resumable, complete, exact about long prompts."""

import json

import numpy as np
import pytest

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.data.prompts import JsonlProblems, PromptStream, TaskProblems, batch
from nereus_jax.data.tasks import Problem
from nereus_jax.data.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=<>: ")


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def problems_of_lengths(*lengths):
    return [Problem(prompt="x" * n, answer=str(n)) for n in lengths]


def stream(problems, **options):
    options = {"seed": 0, "max_prompt_length": 8, **options}
    return PromptStream(problems, TOKENIZER, **options)


def test_jsonl_keeps_order_skips_blank_lines_and_reads_fields(tmp_path):
    rows = [{"prompt": f"p{i} é", "answer": f"#### {i}", "extra": i} for i in range(3)]
    path = write(tmp_path / "x.jsonl", rows[0], "", rows[1], "   ", rows[2], "")
    problems = JsonlProblems(path)
    assert len(problems) == 3
    for i in range(3):
        problem = Problem(prompt=f"p{i} é", answer=f"#### {i}", metadata=rows[i])
        assert problems[i] == problem
    with pytest.raises(IndexError):
        problems[3]


def test_jsonl_with_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n{"prompt": "c", "answer": "d"}\r\n'
    )
    problems = JsonlProblems(path)
    assert [problems[i].prompt for i in range(len(problems))] == ["a", "c"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(145.0, "145"), (0.5, "0.5"), (7, "7"), ("145.0", "145.0"), (True, "true"), (["é"], '["é"]')],
)
def test_answers_become_text(tmp_path, value, text):
    row = {"Body": "Two pens.", "Question": "How many?", "Answer": value}
    problems = JsonlProblems(write(tmp_path / "x.jsonl", row), "Body+Question", "Answer")
    assert problems[0].prompt == "Two pens. How many?"
    assert problems[0].answer == text


GOOD = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((GOOD, '{"prompt": '), r"x\.jsonl: line 2: not JSON"),
        ((GOOD, "", "[1]"), r"line 3: must be a JSON object, got list"),
        (
            ({"question": "p", "answer": "a"},),
            r"line 1: no field 'prompt'; its fields: question, ans",
        ),
        (({"Prompt": "p", "answer": "a"},), r"no field 'prompt' \(did you mean 'Prompt'\?\)"),
        (({"prompt": "p", "answers": "a"},), r"did you mean 'answers'.*set data\.answer_field"),
        (({"prompt": None, "answer": "a"},), r"field 'prompt' is null"),
        (({"prompt": [1], "answer": "a"},), r"field 'prompt' must be text, got \[1\]"),
        ((), r"is empty; it needs one JSON object a line"),
        (("", " "), r"is empty"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as caught:
        JsonlProblems(write(tmp_path / "x.jsonl", *lines))
    assert "\n" not in str(caught.value)


def test_jsonl_missing_and_not_utf8(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl does not exist.*task:NAME"):
        JsonlProblems(tmp_path / "none.jsonl")
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "answer": "a"}')
    with pytest.raises(DataError, match="line 1: not JSON"):
        JsonlProblems(path)


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
