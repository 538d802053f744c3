"""What the checks are made of: a client, a judge of tokens, and the executor under test."""
