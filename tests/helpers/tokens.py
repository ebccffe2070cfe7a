"""Small folders with a tokenizer.json, made here."""

import json
import pathlib

TEXTS = ["some words of a text", "words that make a text", "user", "assistant", "a question"]

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""Of chats, without marks of answers."""


def folder(path: pathlib.Path, begin: str = "", template: str | None = None) -> pathlib.Path:
    """Writes a byte-level tokenizer with the special tokens `<s>`, `</s>` and `<|turn|>`.

    Args:
      path: The folder, made if it is not there.
      begin: Token that the tokenizer puts before a text.
      template: Of chats.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 10, trainer)
    if begin:
        special = [(begin, made.token_to_id(begin))]
        made.post_processor = processors.TemplateProcessing(f"{begin} $A", special_tokens=special)
    path.mkdir(parents=True, exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>"}
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
