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

QWEN_CODER = """\
{%- if tools %}
  {{- '<|im_start|>system\\nThe functions:\\n<tools>' }}
  {%- for tool in tools %}
    {{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>\\n' ~ tool.function.description }}
    {{- '\\n<parameters>' ~ (tool.function.parameters | tojson) ~ '</parameters>\\n</function>' }}
  {%- endfor %}
  {{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n<function=a_name>\\n<parameter=one>\\nvalue\\n' }}
  {{- '</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
    {%- for name, value in call.function.arguments | items %}
      {{- '<parameter=' + name + '>\\n' }}
      {%- set is_text = value is string or not (value is mapping or value is sequence) %}
      {{- value | string if is_text else value | tojson }}
      {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SEED = """\
{%- set begin, end = '<seed:tool_call>', '</seed:tool_call>' %}
{%- if tools %}
  {{- bos_token + 'system\\n' + (tools | tojson) + '\\nCall one so:\\n' }}
  {{- '<seed:tool_call>\\n<function=a_name>\\n' }}
  {{- '<parameter=one>value</parameter>\\n</function>\\n</seed:tool_call>' }}
{%- endif %}
{%- for message in messages %}
  {{- bos_token + message.role + '\\n' + message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '\\n' + begin + '\\n<function=' + call.function.name + '>\\n' }}
    {%- for name, value in call.function.arguments | items %}
      {{- '<parameter=' + name + '>' }}
      {{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n' + end }}
  {%- endfor %}
  {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- bos_token + 'assistant\\n' }}{%- endif %}"""
GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
  {{- '<|system|>\\n<tools>\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
  {{- '</tools>\\nCall one so:\\n<tool_call>{name}\\n' }}
  {{- '<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>' }}
  {{- '\\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|' + ('observation' if message.role == 'tool' else message.role) + '|>\\n' + message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>' + call.function.name + '\\n' }}
    {%- for name, value in call.function.arguments | items %}
      {{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
      {{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}
    {%- endfor %}
    {{- '</tool_call>' }}
  {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
MINIMAX = """\
{%- if tools %}
  {{- ']~b]system\\n<tools>' }}{%- for tool in tools %}{{- tool.function | tojson }}{%- endfor %}
  {{- '</tools>\\nCall one so:\\n<minimax:tool_call>\\n<invoke name="a_name">\\n' }}
  {{- '<parameter name="one">value</parameter>\\n</invoke>\\n</minimax:tool_call>[e~[\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- ']~b]' + message.role + '\\n' + message.content }}
  {%- if message.tool_calls %}
    {{- '\\n<minimax:tool_call>\\n' }}
    {%- for call in message.tool_calls %}
      {{- '<invoke name="' + call.function.name + '">\\n' }}
      {%- for name, value in call.function.arguments | items %}
        {{- '<parameter name="' + name + '">' }}
        {{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
      {%- endfor %}
      {{- '</invoke>\\n' }}
    {%- endfor %}
    {{- '</minimax:tool_call>' }}
  {%- endif %}
  {{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]assistant\\n' }}{%- endif %}"""
GRANITE = """\
{%- if tools %}
  {{- '<|start_of_role|>system<|end_of_role|>Answer with <|tool_call|> followed by a JSON list of calls.' }}
  {{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}
  {%- if message.tool_calls %}
    {{- '<|tool_call|>[' }}
    {%- for call in message.tool_calls %}
      {{- '{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}{{- '}' }}
      {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
    {{- ']' }}
  {%- endif %}
  {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
MISTRAL_LIST = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
  {%- if message.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' }}
      {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
    {{- ']</s>' }}
  {%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}
  {%- else %}{{- '[INST]' + message.content + '[/INST]' }}
  {%- endif %}
{%- endfor %}"""
MISTRAL_NAMES = MISTRAL_LIST.replace(
    MISTRAL_LIST[MISTRAL_LIST.index("    {{- '[TOOL_CALLS] [") : MISTRAL_LIST.index("  {%- elif")],
    """\
    {{- message.content }}
    {%- for call in message.tool_calls %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{- call.function.arguments | tojson }}
    {%- endfor %}
    {{- '</s>' }}
""",
)

_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
_HARMONY = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")]
_MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"]
_CALLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

TOOL_STYLES = {
    "Qwen2.5": Style(QWEN, byte_level(_CHATML, _CALLS)),
    "Qwen3": Style(QWEN, byte_level(_CHATML, [*_CALLS, "<think>", "</think>"])),
    "gpt-oss": Style(HARMONY, byte_level(_HARMONY)),
    "Llama 3": Style(LLAMA, byte_level(_LLAMA), bos="<|begin_of_text|>"),
    "Llama 3 pythonic": Style(PYTHONIC, byte_level(_LLAMA)),
    "Hermes": Style(HERMES, byte_level([*_CHATML, "<s>"], _CALLS), bos="<s>"),
    "markers as text": Style(QWEN, byte_level(_CHATML)),
    "Qwen3-Coder": Style(QWEN_CODER, byte_level(_CHATML, _CALLS)),
    "Seed-OSS": Style(
        SEED,
        byte_level(["<seed:bos>", "<seed:eos>"], ["<seed:tool_call>", "</seed:tool_call>"]),
        bos="<seed:bos>",
    ),
    "GLM-4.5": Style(
        GLM,
        byte_level(
            ["<|endoftext|>", *(f"<|{role}|>" for role in ("system", "user", "assistant", "observation"))],
            ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        ),
    ),
    "MiniMax-M2": Style(
        MINIMAX, byte_level(["]~b]", "[e~["], ["<minimax:tool_call>", "</minimax:tool_call>"])
    ),
    "Granite 3": Style(
        GRANITE, byte_level(["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"])
    ),
    "Mistral": Style(MISTRAL_LIST, byte_level(_MISTRAL), bos="<s>"),
    "Ministral 3": Style(MISTRAL_NAMES, byte_level([*_MISTRAL, "[CALL_ID]", "[ARGS]"]), bos="<s>"),
    "markers of GLM as text": Style(GLM, byte_level(["<|endoftext|>", "<|user|>", "<|assistant|>"])),
    "names in tokens": Style(QWEN, byte_level([*_CHATML, "<repo_name>", "<function_end>", "<|type|>"])),
}
