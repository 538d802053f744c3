"""What is computed row by row: norms, drawing tokens."""
