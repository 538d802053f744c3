"""A fixed corpus of grammars, and judges of their texts that know nothing of the grammar engine."""
