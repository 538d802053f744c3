"""The tokenizer process: text to token ids, under limits. `text.launch` starts it, and nothing imports it.

Tokenizer and chat template come from an executor, prompts from clients; any of them may need unbounded
memory and time. So they run in a process that can be killed and replaced, and the scheduler's own process
imports neither `tokenizers` nor `jinja2`.
"""
