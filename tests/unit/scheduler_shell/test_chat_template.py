"""Chat templates: rendered as models expect, and unable to reach beyond their sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_service.text.worker.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, str]] = HELLO) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, 1000)


def test_the_prompt_ends_where_the_assistant_begins() -> None:
    assert render(CHATML) == "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_blocks_leave_no_white_space_and_loops_have_controls() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n{% break %}{% endif %}\n"
        "{{ m.content }}\n{% endfor %}"
    )
    assert render(source, HELLO * 3) == "hello\n"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages[0] | tojson }}", [{"role": "u", "content": "<é>"}]) == (
        '{"role": "u", "content": "<é>"}'
    )


def test_helpers_that_templates_expect_are_there() -> None:
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_an_error_raised_by_a_template_is_reported() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_is_one_typed_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_content_is_data_and_never_a_template() -> None:
    content = "{{ 7 * 7 }}{% raw %}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_a_template_that_does_not_compile_is_refused_when_made() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}", bos_token="", eos_token="")


TRAINED = """\
{%- set mode = "/think" -%}
{%- for message in messages -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- else -%}
        {%- generation -%}
            {%- if mode == "/think" -%}
                {%- set mode = "" -%}
                {{ "<|im_start|>assistant\\n<think>" + mode }}
            {%- endif -%}
            {{ message.content | trim }}
  {% generation %}<|im_end|>{% endgeneration %}
        {%- endgeneration -%}
        {{ "\\n" + mode }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}
"""


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_a_template_marks_for_training_is_rendered_as_transformers_renders_it(count: int) -> None:
    """`{% generation %}`, which SmolLM3's template has; variables that are set inside end with the block."""
    contents = ["hello", "  hi <b> ", "bye", "é", "?"][:count]
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    rendered: Any = render_jinja_template([messages], chat_template=TRAINED, add_generation_prompt=True)
    assert rendered[0] == [render(TRAINED, messages)]
