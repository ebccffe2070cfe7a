"""Text from a model: where it stops, several prompts, draws, and answers by a chat template."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.snippets import ROOT
from train import generate
from train.data.tokenizer import load_tokenizer

VOCAB = 10
GPT2 = ROOT / "tests" / "golden" / "huggingface" / "gpt2"


def count_up(tokens):
    """A model that says the next number."""
    return jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)


def rows_of(*rows, room=6):
    lengths = np.array([len(row) for row in rows])
    return np.array([row + [0] * (lengths.max() + room - len(row)) for row in rows]), lengths


def test_each_row_goes_on_from_its_own_end_and_stops_at_an_end_token():
    tokens, lengths = rows_of([3], [1, 2, 5])
    found, after = generate.continued(count_up, tokens, lengths, 4, ends=(6, 9))
    assert [row[:n].tolist() for row, n in zip(found, after, strict=True)] == [
        [3, 4, 5, 6],
        [1, 2, 5, 6],
    ]
    found, after = generate.continued(count_up, tokens, lengths, 4)
    assert found[0, :5].tolist() == [3, 4, 5, 6, 7] and after.tolist() == [5, 7]


def test_draws_have_the_models_probabilities_and_a_row_has_its_own():
    chance = np.array([0.5, 0.3, 0.2])
    logits_of = lambda tokens: jnp.broadcast_to(jnp.log(chance), (*tokens.shape, 3))
    draw = lambda seed, rows, heat=1.0: generate.continued(
        logits_of,
        *rows_of(*[[0]] * rows, room=1),
        1,
        temperature=heat,
        key=jax.random.key(seed),
    )[0][:, 1]
    many = draw(0, 4000)
    share = np.bincount(many, minlength=3) / many.size
    assert np.all(np.abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / many.size))
    np.testing.assert_array_equal(draw(0, 9), many[:9])  # whoever stands beside it
    assert np.any(draw(1, 100) != many[:100])
    assert np.mean(np.asarray(draw(0, 400, 0.1)) == 0) > 0.95


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(GPT2, tmp_path / "gpt2")


def settings(folder, name="config.json", **changes):
    old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(old | changes))


def test_prompts_side_by_side_continue_as_each_alone(model):
    prompts = ["ab", "a longer"]
    both = generate.generated(model, prompts, 4)
    assert both == [generate.generated(model, [prompt], 4)[0] for prompt in prompts]
    assert all(text.startswith(prompt) for text, prompt in zip(both, prompts, strict=True))


def test_the_end_token_is_that_of_the_generation_config(model):
    tokenizer = load_tokenizer(model)
    tokens = lambda text: tokenizer.encode([text])[0].tolist()
    one, four = (generate.generated(model, ["ab"], count) for count in (1, 4))
    assert one != four
    settings(model, eos_token_id=tokens(one[0])[-1])
    assert generate.generated(model, ["ab"], 4) == one
    settings(model, "generation_config.json", eos_token_id=[299, 298])
    assert generate.generated(model, ["ab"], 4) == four


def test_an_answer_follows_the_chat_template(model):
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}a{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    (answer,) = generate.generated(model, ["hi"], 4, chat=True)
    assert "uhia" + answer == generate.generated(model, ["uhia"], 4)[0]


def test_a_model_of_bytes_needs_no_tokenizer_and_a_run_is_exported_first(model):
    from safetensors import numpy as safe

    weights = safe.load_file(model / "model.safetensors")
    weights = {k: v[:256] if "wte" in k else v for k, v in weights.items() if "lm_head" not in k}
    safe.save_file(weights, model / "model.safetensors")
    settings(model, vocab_size=256, eos_token_id=None)
    (model / "tokenizer.json").unlink()
    (text,) = generate.generated(model, ["import"], 3)
    assert text.startswith("import") and len(text) > 6
    # A newline is a byte like others: documents have some inside.
    first = text.encode()[6]
    weights["transformer.wte.weight"][[10, first]] = weights["transformer.wte.weight"][[first, 10]]
    safe.save_file(weights, model / "model.safetensors")
    (text,) = generate.generated(model, ["import"], 3)
    assert text.startswith("import\n") and len(text) > 7
    # A model of bytes may have more tokens, if its folder says so; they are no text.
    more = np.concatenate([weights["transformer.wte.weight"], np.ones((44, 16), np.float32)])
    safe.save_file(weights | {"transformer.wte.weight": more}, model / "model.safetensors")
    settings(model, vocab_size=300)
    with pytest.raises(ValueError, match="tokenizer.json"):
        generate.generated(model, ["import"], 3)
    settings(model, reads_bytes=True)
    texts = generate.generated(model, ["import"] * 9, 9, temperature=99.0)
    assert all(text.startswith("import") for text in texts)
    assert 9 > np.mean([len(text) - 6 for text in texts]) > 6
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    with pytest.raises(ValueError, match="is an adapter of some/model; write .*FOLDER --like BASE"):
        generate.generated(model, ["import"], 3)
    (model / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is a run; write python -m train.export .* FOLDER, and"):
        generate.generated(model, ["import"], 3)


@pytest.mark.parametrize(
    ("prompts", "more", "text"),
    [
        ([], {}, "got 0 prompts"),
        (["a"], {"temperature": -1.0}, "temperature of 0 or more"),
        (["a"], {"temperature": float("nan")}, "got 1 prompts, temperature=nan"),
        (["a"], {"count": -1}, "-1 tokens to add; .* and --tokens of 0 or more"),
        (["a"], {"seed": 2**32}, "seed=4294967296 must be in"),  # drew as 0 does
        (["a", ""], {}, "needs a prompt"),
        (["a"], {"chat": True}, "chats need a chat template"),
    ],
)
def test_wrong_arguments_are_refused(prompts, more, text):
    with pytest.raises(ValueError, match=text):
        generate.generated(GPT2, prompts, **{"count": 2} | more)


def test_the_program_prints_a_line_a_prompt(capsys):
    generate.main([str(GPT2), "ab", "c", "--tokens", "2", "--temperature", "9", "--seed", "3"])
    made = generate.generated(GPT2, ["ab", "c"], 2, temperature=9, seed=3)
    assert capsys.readouterr().out == "\n".join(made) + "\n"
    assert generate.generated(GPT2, ["ab", "c"], 2, temperature=9, seed=4) != made
