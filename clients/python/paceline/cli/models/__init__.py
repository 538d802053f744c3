"""Models of this machine and of others: where they lie, what they are called, how they get here.

directories.py  where they lie
local.py        what lies there, and what it is called
wheel.py        the default model, from a wheel
hub_files.py    which files of a hub's repository are a model
hub.py          the same, fetched and verified
web.py          a GGUF file from any web server, with a digest
"""
