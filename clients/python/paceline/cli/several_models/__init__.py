"""`paceline serve` of several models at one address (docs/several-models.md).

config.py  which models: names on the command line, or a YAML file
plan.py    a model's launch and what it needs of memory
memory.py  pure: which models are loaded next, and which are put away for them
stacks.py  the models' processes, and the router's
"""
