"""A step's walk: begun, waited for, committed, answered."""
