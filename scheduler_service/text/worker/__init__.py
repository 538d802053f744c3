"""The tokenizer process: text to token ids, under limits. `text.process` starts it, and nothing imports it.

Tokenizer and chat template come from an executor, prompts from clients; either may take memory and
time without bound. So they run here, in a process that can be killed and replaced, and the
scheduler's own process imports neither `tokenizers` nor `jinja2`.
"""
