"""Drafting decisions: what to draft, how likely it is to be accepted, what a step costs, how many.

`ngram` and `drafters` propose, `acceptance` estimates, `step_time` fits, `controller` chooses. All pure:
time comes in as measured seconds, and the same observations give the same choices.
"""
