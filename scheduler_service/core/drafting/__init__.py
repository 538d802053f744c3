"""Drafting for sequences: which sequence gets which drafts, and the draft executor's steps and caches.

`speculator` decides, `draft_caches` plans and reads the draft executor's steps. Both know sequences; the
arithmetic that they use (`core.speculation`) does not.
"""
