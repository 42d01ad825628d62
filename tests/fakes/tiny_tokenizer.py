"""A byte-level BPE of a few hundred tokens, and chat templates in the spirit of the public ones: rendering tests need no checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = [
    "user\nassistant\nsystem\ntool\n",
    '<tool_call>\n{"name": "look_up", "arguments": {"key": "alpha"}}\n</tool_call>',
    "<think>\nThe user asks for a thing.\n</think>\n\n",
    "Hello, how are you? I will look that up for you. The answer is 1.",
]

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

NATIVE_CALLS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Thinking is shown only after the last user message, as some thinking models' templates do.
DROPS_OLD_THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' else message.content %}
{%- if message.reasoning_content and loop.index0 > ns.last %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

OPENS_THINKING = CHATML.replace("'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}")


def tiny_tokenizer(*, call_tags: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML tokens; `call_tags` makes the call tags single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if call_tags:
        tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"]
    )


def save_checkpoint(directory: Path, *, chat_template: str | None) -> Path:
    """A checkpoint directory that holds only the tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory
