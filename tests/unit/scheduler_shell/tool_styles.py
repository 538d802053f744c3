"""Chat formats with tools as model families have them, each with a small tokenizer of its kind."""

from __future__ import annotations

from tests.unit.scheduler_shell.chat_styles import Style, byte_level

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather of a city.\nNot of <a> country & its "regions".',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "unit": {"enum": ["°C", "°F"]},
                    "end": {"type": "integer", "default": 3},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(name: str, arguments: dict[str, object] | str, id_: str = "call_1") -> dict[str, object]:
    """A call as templates get it."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("get_weather", {"city": "Köln", "unit": "°C", "n": [1, 2.5, None, True]})],
    },
    {"role": "tool", "content": '{"degrees": 21}', "tool_call_id": "call_1", "name": "get_weather"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
]

QWEN = """\
{%- if tools %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
  {{- "# Tools\\n\\nFunctions you may call are between <tools> and </tools>:\\n<tools>" }}
  {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
  {{- "\\n</tools>\\n\\nCall one so:\\n<tool_call>\\n" }}
  {{- "{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>" }}
  {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for tool_call in message.tool_calls %}
      {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
      {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
      {{- tool_call.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}"""
LLAMA = """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
  {%- set system_message = messages[0]['content'] | trim %}
  {%- set messages = messages[1:] %}
{%- else %}
  {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- if tools is not none %}
  {%- set first = messages[0]['content'] | trim %}
  {%- set messages = messages[1:] %}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
  {{- 'Answer with JSON for a function call: ' }}
  {{- '{"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
  {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
  {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
    {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
    {%- if message.content is mapping or message.content is iterable %}
      {{- message.content | tojson }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
HERMES = """\
{%- macro type_of(spec) %}
  {%- if spec.type == 'string' %}{{- 'str' }}{%- elif spec.type == 'integer' %}{{- 'int' }}
  {%- elif spec.enum %}{{- 'Union' + (spec.enum | join(',')) }}{%- else %}{{- 'Any' }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\nYou call functions. They are: <tools>' }}
{%- if tools %}{%- for tool in tools %}
  {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
  {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
  {%- for name, spec in tool.parameters.properties | items %}
    {{- name + ': ' + type_of(spec) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
  {%- endfor %}
  {{- ') - ' + tool.description + '", "parameters": ' }}
  {%- if tool.parameters.properties | length == 0 %}{{- '{}' }}
  {%- else %}{{- tool.parameters | tojson }}{%- endif %}{{- '}\\n' }}
{%- endfor %}{%- endif %}
{{- '</tools> Answer so: <tool_call>\\n{"name": <name>, "arguments": <args-dict>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif message.tool_calls is defined %}
    {{- '<|im_start|>' + message.role }}
    {%- for tool_call in message.tool_calls %}
      {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
      {{- tool_call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PYTHONIC = (
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "To call functions write [func_name1(params_name1=params_value1, params_name2=params_value2), "
    "func_name2(params)]. They are:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}[{% for c in message.tool_calls %}{{ c.function.name }}("
    "{% for name, value in c.function.arguments | items %}{{ name }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]"
    "{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

HARMONY = """\
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
  {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
  {%- for tool in tools %}{{- tool.function.name + ' = ' + (tool.function | tojson) + '\\n' }}{%- endfor %}
  {{- '}<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {%- if message.thinking %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
    {%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson }}{{- '<|call|>' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
  {%- elif message.role == 'tool' %}
    {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' }}
    {{- message.content | tojson }}{{- '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
_HARMONY = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")]
_CALLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

TOOL_STYLES = {
    "Qwen2.5": Style(QWEN, byte_level(_CHATML, _CALLS)),
    "Qwen3": Style(QWEN, byte_level(_CHATML, [*_CALLS, "<think>", "</think>"])),
    "gpt-oss": Style(HARMONY, byte_level(_HARMONY)),
    "Llama 3": Style(LLAMA, byte_level(_LLAMA), bos="<|begin_of_text|>"),
    "Llama 3 pythonic": Style(PYTHONIC, byte_level(_LLAMA)),
    "Hermes": Style(HERMES, byte_level([*_CHATML, "<s>"], _CALLS), bos="<s>"),
    "markers as text": Style(QWEN, byte_level(_CHATML)),
    "names in tokens": Style(QWEN, byte_level([*_CHATML, "<repo_name>", "<function_end>", "<|type|>"])),
}
