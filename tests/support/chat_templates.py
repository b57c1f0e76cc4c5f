# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Chat templates in the manner of known targets, and a tokenizer of single characters, whose tokens are its text."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKERS = ["<|im_start|>", "<|im_end|>"]

# Of SmolLM2: any role as it is, a system prompt of its own, no tools.
SMOLLM2 = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are SmolLM<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

_TOOLS = """\
{%- macro called(message) %}
    {%- for call in message.tool_calls %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- macro result(message, first, last) %}
    {%- if first %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if last %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endmacro %}
"""

# Of Qwen2.5-Coder: tools in the system prompt, calls as JSON, results as the user's.
QWEN_CODER = (
    _TOOLS
    + """\
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if has_system else 'You are Qwen') }}
{%- if tools %}
    {{- '\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- set messages = messages[1:] if has_system else messages %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- result(message, loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') + called(message) }}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

# Of Qwen3: the last answer has its thought, earlier ones have none, and `enable_thinking` writes an empty one.
THINKING = (
    _TOOLS
    + """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- result(message, loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + called(message) + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

TEMPLATES = {"smollm2": SMOLLM2, "qwen_coder": QWEN_CODER, "thinking": THINKING}


def character_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a character, and one for each marker of a message."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *MARKERS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>", chat_template=template
    )
