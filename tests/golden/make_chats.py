"""Makes tests/golden/chats.json: chats as transformers renders them, by templates of known kinds.

    pip install transformers jinja2    # in an environment of its own; made with 5.24 and 3.1.6
    PYTHONPATH=. python tests/golden/make_chats.py tests/golden/chats.json

The templates are written here, in the style of public models. Each is tried with each chat that it
takes. Where a template marks answers, `masks` are transformers' `assistant_masks`, by the tokenizer
of `tests/helpers/tokens.py`; its merges reach over the marks in the last template.
"""

import json
import pathlib
import sys
import tempfile

import jinja2
import transformers

from tests.helpers import tokens

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
            {{- '{"name": "' + call.function.name + '", ' }}
            {{- '"parameters": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}<|eot_id|>" }}
        {%- endfor %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN_2_5 = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN_3 = """\
{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == "user" %}
        {%- set ns.seeking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = """\
{%- set today = strftime_now("%Y")[:2] %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}[SYSTEM_PROMPT]{{ today }}{{ system_message }}[/SYSTEM_PROMPT]
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant") }}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message["tool_calls"] is defined and message["tool_calls"] is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message["tool_calls"] %}
            {%- set out = tool_call["function"]|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call["id"] + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message["content"]|string|tojson + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {%- set role = 'model' -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model
' }}
{%- endif -%}
"""
PHI = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{% continue %}{% endif %}{{'<|' + message['role'] + '|>\n' + (message['content'] or '') + "
    "'<|end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}"
    "{{ eos_token }}{% endif %}"
)
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false -%}
        {{ '<\uff5cUser\uff5c>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<\uff5cAssistant\uff5c>' }}{% generation %}{{ content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}
"""
JOINED = (  # with the helper's tokenizer, "some words of a text" has a token "words"
    "{% for m in messages %}{{ m.role }} wo{% if m.role == 'assistant' %}"
    "{% generation %}rds {{ m.content }} wor{% endgeneration %}ds {% else %}rds {{ m.content }} "
    "{% endif %}{% endfor %}"
)
FILTERS = (
    "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}"
    "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=1) }}{{ m | dictsort }}"
    "{{ m | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true) }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{{ m.items() | list }}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama_3": LLAMA_3,
    "qwen_2_5": QWEN_2_5,
    "qwen_3": QWEN_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "zephyr": ZEPHYR,
    "deepseek": DEEPSEEK,
    "joined": JOINED,
    "filters": FILTERS,
}

ARGUMENTS = {"query": "it's <b>5 > 3</b> & gr\u00f6\u00dfer \U0001f642", "a": [1, 2.5, None, True]}
CALL = {"type": "function", "id": "abc123def", "function": {"name": "f", "arguments": ARGUMENTS}}
CHATS = {
    "plain": [
        {"role": "user", "content": " a question\u00e9 "},
        {"role": "assistant", "content": " words of a \U0001f642 text \n"},
        {"role": "user", "content": "some <|im_end|></s> words"},
        {"role": "assistant", "content": "two"},
    ],
    "system": [
        {"content": "be <kind> & brief", "role": "system"},
        {"content": "a question", "role": "user"},
        {"content": "<think>\nso\n</think>\n\nsome words", "role": "assistant"},
    ],
    "tools": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "abc123def", "content": '{"b": 1}'},
        {"role": "assistant", "content": "done", "reasoning": "it is", "tool_calls": None},
    ],
}


def main(file: pathlib.Path) -> None:
    """Writes what transformers makes of each chat by each template, or that it refuses it."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        made = transformers.PreTrainedTokenizerFast.from_pretrained(
            tokens.folder(pathlib.Path(folder))
        )
        for name, template in TEMPLATES.items():
            for chat, messages in CHATS.items():
                case = {"template": name, "chat": chat, "text": None}
                options = {"chat_template": template}
                try:
                    case["text"] = made.apply_chat_template(messages, tokenize=False, **options)
                except (jinja2.TemplateError, TypeError) as error:
                    print(f"{name}, {chat}: {error}")
                else:
                    if "generation %}" in template:
                        case["masks"] = made.apply_chat_template(
                            messages, return_dict=True, return_assistant_tokens_mask=True, **options
                        )["assistant_masks"]
                cases.append(case)
    contents = {"templates": TEMPLATES, "chats": CHATS, "cases": cases}
    file.write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
