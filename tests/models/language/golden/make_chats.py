"""Makes the golden file `chats.json`: conversations as `transformers` encodes them.

    pip install '.[parity]'
    python -m tests.models.language.golden.make_chats

For each template and each conversation, the tokens of `apply_chat_template`, without and
with `add_generation_prompt`, by :func:`make_backend`; null where the template refuses it.
"""

import json
import pathlib
from typing import Any

import tokenizers

HERE = pathlib.Path(__file__).resolve().parent

#: After the templates that models of these families have, cut to what they do with texts.
TEMPLATES = {
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "qwen2": """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "qwen3": """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 == ns.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
    "mistral": """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' -}}
{% elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] + eos_token -}}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}{% endfor %}""",
    "phi3": """{% for message in messages %}
{% if message['role'] == 'system' %}
{{- '<|system|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- else %}{{- eos_token }}{%- endif %}""",
    "chatml": """{% if messages[0].tools %}{{ messages[0].tools | tojson }}{% endif %}
{% for message in messages %}
{% if message['role'] == 'stop' %}{% break %}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
}

SPECIAL = [
    *("<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"),
]
#: Of Phi-3: they take the space after them.
STRIPPING = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASKED = message("user", "Is the film good?")
CONVERSATIONS = {
    "one turn": [ASKED, message("assistant", "It is\n\ngood.")],
    "with a system": [
        message("system", " Be short. "),
        ASKED,
        message("assistant", " Yes! "),
    ],
    "two turns": [
        ASKED,
        message("assistant", "Yes — 日本語."),
        message("user", "\nWhy?", name=None),
        message("assistant", "\nIt was warm."),
    ],
    "with tools": [
        message("user", "Go", tools=[{"name": "é<"}]),
        message("assistant", "No"),
    ],
}


def make_backend() -> tokenizers.Tokenizer:
    """Bytes, and few pairs of them: the same for every version of the package."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "g"), ("o", "o"), ("Ġg", "oo"), ("Ġ", "Y"), (".", "Ċ")]
    vocabulary = [*letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({x: i for i, x in enumerate(vocabulary)}, merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    added = tokenizers.AddedToken
    backend.add_special_tokens(
        [added(name, rstrip=True, special=True) for name in STRIPPING]
    )
    backend.add_tokens(["<think>", "</think>"])  # No special ones, as of Qwen 3.
    return backend


def expect(template: str) -> dict[str, list[list[int]] | None]:
    """What `transformers` makes of each conversation."""
    import jinja2
    import transformers  # pyright: ignore[reportMissingImports]

    kind: Any = transformers.PreTrainedTokenizerFast
    theirs = kind(tokenizer_object=make_backend(), chat_template=template, **NAMES)
    found: dict[str, list[list[int]] | None] = {}
    for name, messages in CONVERSATIONS.items():
        try:
            found[name] = [
                theirs.apply_chat_template(
                    messages, add_generation_prompt=prompt, return_dict=False
                )
                for prompt in (False, True)
            ]
        except jinja2.TemplateError:
            found[name] = None
    return found


def main() -> None:
    found = {name: expect(template) for name, template in TEMPLATES.items()}
    (HERE / "chats.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
