"""Steps that run ahead of the host: launched, captured as graphs, repeated on other ranks."""
