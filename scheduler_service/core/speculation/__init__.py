"""The arithmetic of speculative decoding: what to draft, how likely it is accepted, how many drafts pay off.

`ngram` and `drafters` propose, `acceptance` estimates, `step_time` fits, `controller` chooses, `draft_state`
keeps one sequence's share of it. Nothing here knows a sequence: token lists, counts and measured seconds come
in, and the same observations give the same choices. `core.drafting` applies it to sequences.
"""
