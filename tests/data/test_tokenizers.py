"""The character tokenizer, and a Hugging Face directory made here: ids, specials, chat template."""

import json
import sys

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from nereus_jax.core.errors import ConfigError, DataError
from nereus_jax.data.tokenizers import CharacterTokenizer, HuggingFaceTokenizer

TEMPLATE = (
    "{% for message in messages %}\n"
    "  {% if message['role'] == 'tool' %}{{ raise_exception('no tools,\nplease') }}{% endif %}\n"
    "{{ bos_token if loop.first }}{{ message['role'] }} {{ message['content'] }} {{ eos_token }} "
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ("<unk>", "<s>", "</s>", "<pad>", "user", "assistant", "system", "hi", "you")


def write_json(path, content):
    path.write_text(json.dumps(content))


@pytest.fixture
def directory(tmp_path):
    """A word tokenizer that starts every text with <s>."""
    vocab = {w: i for i, w in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": None,
        "chat_template": TEMPLATE,
    }
    write_json(tmp_path / "tokenizer_config.json", settings)
    return tmp_path


def change(directory, name, **fields):
    path = directory / name
    content = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {k: v for k, v in (content | fields).items() if v is not ...})


def test_characters():
    tokenizer = CharacterTokenizer("01+=")
    assert tokenizer.vocab_size == 7
    assert (tokenizer.pad_id, tokenizer.eos_ids) == (0, (2,))
    assert tokenizer.encode("1+0=") == [4, 5, 3, 6]
    assert tokenizer.decode([1, 4, 5, 2, 0, 99]) == "1+"
    with pytest.raises(DataError, match=r"character 'x' of '1x' is not in .*'01\+='"):
        tokenizer.encode("1x")
    with pytest.raises(ConfigError, match="chat_template = False"):
        tokenizer.render_chat([])
    with pytest.raises(ConfigError, match="is empty"):
        CharacterTokenizer("")
    with pytest.raises(ConfigError, match=r"repeats \['a'\]"):
        CharacterTokenizer("aba")


def test_encode_and_decode(directory):
    tokenizer = HuggingFaceTokenizer(directory)
    assert tokenizer.vocab_size == 10
    assert tokenizer.encode("hi you you") == [1, 7, 8, 8]
    assert tokenizer.encode("hi you", add_special_tokens=False) == [7, 8]
    assert tokenizer.encode("hi <end>", add_special_tokens=False) == [7, 9]
    assert tokenizer.decode([1, 7, 8, 2, 3, 9, 500]) == "hi you"


def test_special_ids_in_order_of_preference(directory):
    assert HuggingFaceTokenizer(directory).eos_ids == (2,)
    change(directory, "config.json", eos_token_id=9, pad_token_id=7)
    assert HuggingFaceTokenizer(directory).eos_ids == (9,)
    change(directory, "generation_config.json", eos_token_id=[2, 9], pad_token_id=8)
    assert HuggingFaceTokenizer(directory).eos_ids == (2, 9)
    assert HuggingFaceTokenizer(directory).pad_id == 3
    change(directory, "tokenizer_config.json", pad_token=...)
    assert HuggingFaceTokenizer(directory).pad_id == 8
    change(directory, "generation_config.json", pad_token_id=-1)
    assert HuggingFaceTokenizer(directory).pad_id == 7
    change(directory, "config.json", pad_token_id=None)
    assert HuggingFaceTokenizer(directory).pad_id == 2
    change(directory, "special_tokens_map.json", pad_token={"content": "<pad>"})
    assert HuggingFaceTokenizer(directory).pad_id == 3


def test_chat_is_rendered_and_encoded_with_one_start(directory):
    tokenizer = HuggingFaceTokenizer(directory)
    messages = [{"role": "system", "content": "you"}, {"role": "user", "content": "hi"}]
    text = tokenizer.render_chat(messages)
    assert text == "<s>system you </s> user hi </s> assistant"
    assert tokenizer.encode(text, add_special_tokens=False) == [1, 6, 8, 2, 4, 7, 2, 5]


def test_template_features(directory):
    template = (
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{{ strftime_now('%Y') | length }}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools is none }}"
    )
    (directory / "chat_template.jinja").write_text(template)
    rendered = HuggingFaceTokenizer(directory).render_chat([{"role": "user", "content": "hi"}])
    assert rendered == '1{"b": "<é>", "a": 1}4hiTrue'
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    change(directory, "tokenizer_config.json", chat_template=named)
    assert HuggingFaceTokenizer(directory).render_chat([]) == "d"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system\nrole') }}",
            "failed for messages of roles .*: no system role",
        ),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1] }}", "the chat template failed"),
        ("{{ 1 // 0 }}", "the chat template failed"),
    ],
)
def test_failing_templates(directory, template, message):
    change(directory, "tokenizer_config.json", chat_template=template)
    tokenizer = HuggingFaceTokenizer(directory)
    with pytest.raises(DataError, match=message) as caught:
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)


def test_template_errors(directory):
    change(directory, "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(DataError, match="malformed chat template"):
        HuggingFaceTokenizer(directory)
    change(directory, "tokenizer_config.json", chat_template=3)
    with pytest.raises(DataError, match="chat_template must be text, got int"):
        HuggingFaceTokenizer(directory)
    change(directory, "tokenizer_config.json", chat_template=...)
    with pytest.raises(ConfigError, match=r"no chat template.*chat_template = False"):
        HuggingFaceTokenizer(directory).render_chat([])


def test_file_errors(directory):
    change(directory, "config.json", eos_token_id=10)
    with pytest.raises(DataError, match=r"config\.json: eos_token_id 10 is not in \[0, 10\)"):
        HuggingFaceTokenizer(directory)
    change(directory, "config.json", eos_token_id="2")
    with pytest.raises(DataError, match="eos_token_id must be an id, got '2'"):
        HuggingFaceTokenizer(directory)
    change(directory, "config.json", eos_token_id=...)
    change(directory, "tokenizer_config.json", eos_token="<eos>")
    with pytest.raises(DataError, match="eos_token '<eos>' is not a token"):
        HuggingFaceTokenizer(directory)
    change(directory, "tokenizer_config.json", eos_token=...)
    with pytest.raises(DataError, match="nothing says which token ends a text"):
        HuggingFaceTokenizer(directory)
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="must hold a JSON object, got list"):
        HuggingFaceTokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        HuggingFaceTokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        HuggingFaceTokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        HuggingFaceTokenizer(directory)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_missing_packages_say_what_to_install(directory, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'nereus_jax\[hf\]'"):
        HuggingFaceTokenizer(directory)
