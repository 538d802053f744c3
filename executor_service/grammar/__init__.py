"""Grammars: text to compiled grammar, and the automaton of each sequence that has one."""
