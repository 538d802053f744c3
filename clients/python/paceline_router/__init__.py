"""One address for several models: passes each call on to the scheduler of the model that it names.

It reads of a request which model it names, and nothing else; requests, answers, statuses and their details
pass unchanged, so that a stream is continued through it as without it. `paceline serve` starts it, and tells
it over a Unix socket which models there are.
"""
